"""How replicas agree: three moments of a step, and what surrounds a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Sync(Protocol):
    """What happens around an engine's run. Every rank calls every method in the same order.

    The defaults are those of replicas that hold the same weights and own their optimizers.
    """

    every_microbatch: bool = False  # report buckets after each micro-batch, not only the last
    waits: bool = True  # False: replicas go at their own pace, and no step asks all of them
    gradient_scale: float = 1.0
    """Factor on a micro-batch's share of the global loss when backward starts.

    1 where gradients are added up over replicas. The number of replicas where weights are
    averaged instead, so that each replica trains on the mean over its own samples.
    """

    share: float = 1.0  # of the global batch: what this replica is about to compute
    passed: bool = False
    """Set by `begin`: the others have done this step without this replica, which leaves it out."""

    first: int = 0
    """The first replica that is left, as far as is known: it saves and speaks for all."""

    def begin(self) -> None:
        """Weights are usable when this returns."""
        return None

    def reduce(self, bucket: slice) -> None:
        """The gradients of this slice are final here; backward may still run."""
        return None

    def finish(self) -> None:
        """The update is done when this returns; the replica is ready for the next step."""
        ...

    def skip(self) -> Tensor:
        """The step was passed over; returns the latest loss that is known."""
        return torch.zeros(())

    def loss(self, part: Tensor) -> Tensor:
        """The loss of the global batch, as far as known after `finish`.

        `part` is this replica's: the loss of its samples times their share of the batch.
        """
        return part

    def row_store(self) -> Any:
        """Where rows of embeddings live that all replicas share; None: in each replica."""
        return None

    def whole(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """While the block runs, the model of each rank holds the weights that count.

        For evaluating and saving. With `optimizer`, the optimizer state of the replica `first`,
        0 where nobody can be missed, is whole, too.
        """
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """While the block runs, forward passes that all ranks make alike use the right weights."""
        return self.whole()

    def restored(self) -> None:
        """A checkpoint was loaded into the model and the optimizer: take it for the truth."""
        return None

    def state(self) -> dict[str, Tensor]:
        """What else a checkpoint has to hold, by name. All ranks call it; rank 0's is saved."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave, or what another strategy did; comes after `restored`."""
        return None

    def gradient_bytes(self) -> int:
        """Memory that is kept for gradients now, besides what backward has left at parameters."""
        return 0

    def report(self) -> dict[str, Any]:
        """What happened in this run, for machines: JSON-able."""
        return {}

    def summary(self) -> list[str]:
        """The same in sentences, shown at the end of a run by rank 0."""
        return []

    def close(self) -> None:
        """The run is over: stop threads, close connections."""
        return None
