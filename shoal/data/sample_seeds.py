"""Randomness inside a dataset: it follows from seed, epoch and sample, not from the worker.

Before each sample the global generators of torch, numpy and random are seeded; after a batch they
are as they were. So an augmentation is the same at any number of workers and loaders, and no two
samples share their numbers. It costs about 20 microseconds a sample.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from shoal.replica.microbatch_context import tracing

_PLAIN = (TensorDataset, list, tuple)  # these draw nothing


def mix(*numbers: int) -> int:
    """One well-distributed seed from several small numbers (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class SeededSamples:
    """A dataset whose samples are drawn with random generators of their own."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        # several samples at a time, as long as that draws nothing
        self._fetches_many = callable(getattr(dataset, "__getitems__", None))
        one = getattr(type(dataset), "__getitem__", None)
        self._fetches_one = one is not Dataset.__getitem__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        with restored_generators():
            if self._fetches_many:
                before = _states()
                found = list(self.dataset.__getitems__(list(indices)))
                if not self._fetches_one or _equal(before, _states()):
                    return found
                self._fetches_many = False
            drawn = []
            for index in indices:
                seed_everything(mix(self.seed, index))
                drawn.append(self.dataset[index])
            return drawn


def seeded(dataset: Any, seed: int) -> Any:
    """The dataset with seeded samples, where samples may draw."""
    return dataset if type(dataset) in _PLAIN else SeededSamples(dataset, seed)


def seed_everything(seed: int) -> None:
    with tracing:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@contextmanager
def restored_generators() -> Iterator[None]:
    """The global generators are afterwards as they were before.

    Ranks that are threads of one process draw from them in turn.
    """
    with tracing:
        torch_state, random_state, numpy_state = _states()
        try:
            yield
        finally:
            torch.default_generator.set_state(torch_state)
            random.setstate(random_state)
            if numpy_state is not None:
                sys.modules["numpy"].random.set_state(numpy_state)


def _states() -> tuple[torch.Tensor, Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return torch.default_generator.get_state(), random.getstate(), state


def _equal(a: tuple[torch.Tensor, Any, Any], b: tuple[torch.Tensor, Any, Any]) -> bool:
    if not torch.equal(a[0], b[0]) or a[1] != b[1]:
        return False
    if a[2] is None or b[2] is None:
        return a[2] is b[2]
    return bool((a[2][1] == b[2][1]).all()) and a[2][2:] == b[2][2:]
