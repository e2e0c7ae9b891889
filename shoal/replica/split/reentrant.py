"""Reentrant checkpoints (torch.utils.checkpoint, use_reentrant=True) in a model that is split.

They hide a block from autograd and call it again outside of the forward that it belongs to, where
what a split forward needs (the calls of a stage, this worker's positions) is not there. So in a
process that splits a model they are computed as those with use_reentrant=False: the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as checkpoints


class NotReentrant(checkpoints.CheckpointFunction):
    """Stands in for torch's own, of which `checkpoint` calls `apply`."""

    @classmethod
    def apply(cls, function: Callable[..., Any], keeps_rng: bool, *args: Any) -> Any:
        return checkpoints.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=keeps_rng
        )


def replace_reentrant_checkpoints() -> None:
    checkpoints.CheckpointFunction = NotReentrant  # type: ignore[misc]
    # one that stops early would leave the random stream of a rank between a column and a row layer
    checkpoints._enable_checkpoint_early_stop = False
