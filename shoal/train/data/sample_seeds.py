"""Randomness inside a dataset: it follows from seed, epoch and sample, not from the worker.

Before each sample the global generators of torch, numpy and random are seeded; after a batch they
are as they were. So an augmentation is the same at any number of workers and loaders, and no two
samples share their numbers. Generators that the first sample does not draw from are left alone;
where a later one draws from them after all, its batch is fetched again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from shoal.replica.host_streams import HostStreams
from shoal.replica.microbatch_context import tracing

_PLAIN = (TensorDataset, list, tuple)  # these draw nothing
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*numbers: int) -> int:
    """One well-distributed seed from several small numbers (splitmix64)."""
    return _mixed(_state(*numbers[:-1]), numbers[-1]) >> 1 if numbers else 0


def mix_each(first: int, numbers: Sequence[int]) -> list[int]:
    """`mix(first, number)` of each number that is not negative, in a sixth of the time."""
    state = np.array(numbers, dtype=np.uint64)
    state += np.uint64((_state(first) + _GAMMA) & _MASK)
    state ^= state >> np.uint64(30)
    state *= np.uint64(_FACTORS[0])
    state ^= state >> np.uint64(27)
    state *= np.uint64(_FACTORS[1])
    state ^= state >> np.uint64(31)
    seeds: list[int] = (state >> np.uint64(1)).tolist()
    return seeds


@lru_cache(maxsize=64)
def _state(*numbers: int) -> int:
    return _mixed(_state(*numbers[:-1]), numbers[-1]) if numbers else 0


def _mixed(state: int, number: int) -> int:
    state = (state + number + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * _FACTORS[0]) & _MASK
    state = ((state ^ (state >> 27)) * _FACTORS[1]) & _MASK
    return state ^ (state >> 31)


class SeededSamples:
    """A dataset whose samples are drawn with random generators of their own."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        # several samples at a time, as long as that draws nothing
        self._fetches_many = callable(getattr(dataset, "__getitems__", None))
        one = getattr(type(dataset), "__getitem__", None)
        self._fetches_one = one is not Dataset.__getitem__
        self._streams: HostStreams | None = None  # of the process that fetches

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if self._streams is None:  # samples that come together are tried without seeds first
            self._streams = HostStreams(True, is_drawn_from=not self._fetches_many)
            if not self._fetches_many:  # the first one alone shows of most datasets what draws
                return self._get(indices[:1], self._streams) + self._get(indices[1:], self._streams)
        return self._get(indices, self._streams)

    def _get(self, indices: Sequence[int], streams: HostStreams) -> list[Any]:
        with tracing:
            if (found := self._get_unseeded(indices, streams)) is not None:
                return found
            while True:
                saved = streams.save()
                try:
                    found = self._fetch(indices, streams)
                finally:
                    is_unseeded = streams.restore(saved)
                if not (is_unseeded and self._fetches_one):
                    return found

    def _get_unseeded(self, indices: Sequence[int], streams: HostStreams) -> list[Any] | None:
        """None where samples draw; most datasets draw nothing, so this has to be quick."""
        words = streams.words()
        if words is None:
            return None
        found = None
        try:
            found = self._fetch_plain(indices)
        finally:
            if streams.words() != words:
                streams.undo(words)
                found = found if not self._fetches_one else None
        return found

    def _fetch(self, indices: Sequence[int], streams: HostStreams) -> list[Any]:
        if not self._fetches_one or not streams.are_drawn_from:
            return self._fetch_plain(indices)
        found = []
        dataset = self.dataset
        seeders = streams.seeders()
        for index, seed in zip(indices, mix_each(self.seed, indices), strict=True):
            for put in seeders:
                put(seed)
            found.append(dataset[index])
        return found

    def _fetch_plain(self, indices: Sequence[int]) -> list[Any]:
        dataset = self.dataset
        if self._fetches_many:
            return list(dataset.__getitems__(list(indices)))
        return [dataset[index] for index in indices]


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
        numpy = sys.modules.get("numpy")
        numpy_state = None if numpy is None else numpy.random.get_state()
        torch_state = torch.default_generator.get_state()
        random_state = random.getstate()
        try:
            yield
        finally:
            torch.default_generator.set_state(torch_state)
            random.setstate(random_state)
            if numpy_state is not None:
                sys.modules["numpy"].random.set_state(numpy_state)
