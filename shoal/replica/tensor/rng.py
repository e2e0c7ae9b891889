"""Random streams where the ranks of a tp group have different shards of an activation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.replica.microbatch_context import get_generators, seed_generators, set_generators


@dataclass
class TensorParallelRng:
    """Between a column and a row layer every rank draws from a stream of its own.

    There the ranks have different features, or different rows. Behind it all of them continue
    with the stream that they had in common.
    """

    rank: int
    active: bool  # whether anything in the model is random
    _common_states: list[Tensor] | None = field(default=None, init=False)

    def fork(self, x: Tensor) -> None:
        """This rank draws from its own stream now; of several column layers the first forks."""
        if self.active and self._common_states is None:
            self._fork(x)

    def restore(self, x: Tensor) -> None:
        """From now on all ranks draw from the common stream."""
        if self._common_states is not None:
            set_generators(x.device, self._common_states)
            self._common_states = None

    @contextmanager
    def forked(self, x: Tensor) -> Iterator[None]:
        """For one operation."""
        if self._common_states is not None:  # forked already
            yield
            return
        self._fork(x)
        try:
            yield
        finally:
            self.restore(x)

    def _fork(self, x: Tensor) -> None:
        seed = int(torch.randint(1 << 62, ()))
        self._common_states = get_generators(x.device)
        seed_generators(x.device, seed + self.rank)
