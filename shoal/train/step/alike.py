"""Workers that compute the same batches, which a loop over a plain DataLoader gives to all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TIMES = 3


class AlikeLosses:
    """Says it where the first losses of all workers are the same."""

    def __init__(self, say: Callable[[str], None], workers: int):
        self._say = say
        self._left = _TIMES if workers > 1 else 0

    def note(self, own: Tensor, mean: Tensor) -> None:
        """The loss of a worker's own batch, and that of all workers."""
        if not self._left:
            return
        is_alike = torch.allclose(own, mean.to(own.dtype), rtol=1e-6)
        self._left = self._left - 1 if is_alike else 0
        if is_alike and not self._left:
            self._say(
                "each worker computes the same batches: job.batches(loader), or a dataset and "
                "batch_size, gives each of them its rows"
            )
