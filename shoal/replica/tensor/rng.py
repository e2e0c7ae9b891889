"""Randomness where the ranks of a tp group have different parts of an activation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.replica.microbatch import default_generators


@dataclass
class Streams:
    """Between a column and a row layer every rank has other features, and else other rows.

    Each rank then draws from a stream of its own; behind it all go on as one.
    """

    rank: int
    active: bool  # whether anything in the model is random
    _states: list[Tensor] | None = field(default=None, init=False)

    def part(self, x: Tensor) -> None:
        if self.active:
            self._part(x)

    def meet(self, x: Tensor) -> None:
        if self._states is not None:
            for generator, state in zip(default_generators(x.device), self._states, strict=True):
                generator.set_state(state)
            self._states = None

    @contextmanager
    def apart(self, x: Tensor) -> Iterator[None]:
        """For one operation."""
        if self._states is not None:  # they have parted already
            yield
            return
        self._part(x)
        try:
            yield
        finally:
            self.meet(x)

    def _part(self, x: Tensor) -> None:
        seed = int(torch.randint(1 << 62, ()))
        generators = default_generators(x.device)
        self._states = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed + self.rank)
