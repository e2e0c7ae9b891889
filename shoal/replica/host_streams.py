"""The global random generators, which a forward or a dataset may draw from.

A step seeds them before each forward and restores them afterwards. To read and write such a state
takes tens to hundreds of microseconds, and hardly any forward draws from it. So a generator that a
forward has left alone is not seeded any more: the 2.5 KB of its Mersenne twister are compared in
memory before and behind a step, and one that is drawn from is seeded from then on. Samples of a
dataset (`train/data/sample_seeds.py`) do the same with a batch; there torch's generator is one.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_some: Callable[[Any], tuple[int, ...]] = itemgetter(0, 2, 5, -1, -2)


class _Snapshot(NamedTuple):
    state: Any  # None: of a generator that nothing draws from
    words: bytes


class _Parked(NamedTuple):
    """A generator of a worker while another worker of this process runs."""

    mark: tuple[int, ...]  # some of the words: every draw and every seed changes them
    state: Any
    seeded: bytes | None
    draws: bool  # between steps: its state may be more than the words, such as half of a pair


class _Stream:
    """One generator; `words` are its state in memory, None where that is not known."""

    def __init__(
        self,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        seed: Callable[[int], None],
        words: ctypes.Array[ctypes.c_uint32] | None,
    ):
        self._get = get
        self._put = put
        self._seed = seed
        self._words = words
        self.is_drawn_from = True  # until a step shows that it is not
        self._copy: tuple[tuple[int, ...], bytes] = (), b""
        self._stays = words is None  # it was seen to be drawn from
        self._seeded: bytes | None = None

    def begin(self, is_drawn_from: bool) -> None:
        self.is_drawn_from = is_drawn_from or self._stays

    def save(self) -> _Snapshot:
        self._seeded = None
        if self.is_drawn_from:
            return _Snapshot(self._get(), b"")
        return _Snapshot(None, self.words_now())

    def seeder(self) -> Callable[[int], None]:
        """`seed`, of which nothing has to be remembered any more."""
        return self._seed if self._stays else self.seed

    def seed(self, seed: int) -> None:
        self._seed(seed)
        self._seeded = None if self._stays else self.words_now()

    def restore(self, before: _Snapshot) -> bool:
        """Whether something has drawn from it, though it was not seeded any more."""
        if before.state is None:
            if is_drawn := self.words_now() != before.words:
                self._put_words(before.words)
                self.is_drawn_from = self._stays = True
            return is_drawn
        if self._seeded is not None:
            self._stays |= self.words_now() != self._seeded
            self.is_drawn_from = self._stays
            self._seeded = None
        self._put(before.state)
        return False

    def park(self, before: _Parked | None) -> _Parked:
        """`before`: when this worker ran last. A state that has not changed is not read again."""
        mark = self._mark()
        if before is None:
            return _Parked(mark, self._get(), self._seeded, False)
        is_same = bool(mark) and mark == before.mark
        draws = before.draws or not (is_same or self._seeded or before.seeded)
        state = before.state if is_same and not draws else self._get()
        return _Parked(mark, state, self._seeded, draws)

    def resume(self, parked: _Parked) -> None:
        if parked.draws or not parked.mark or self._mark() != parked.mark:
            self._put(parked.state)
        self._seeded = parked.seeded

    def _mark(self) -> tuple[int, ...]:
        return () if self._words is None else _some(self._words)

    def words_now(self) -> bytes:
        """Copied where they have changed: copies of all of them would empty the cache."""
        if self._words is None:
            return b""
        if (mark := self._mark()) != self._copy[0]:
            self._copy = mark, bytes(self._words)
        return self._copy[1]

    def _put_words(self, words: bytes) -> None:
        assert self._words is not None
        ctypes.memmove(self._words, words, len(words))


Parked = dict[_Stream, _Parked]


def _words_at(address: int, expected: list[int]) -> ctypes.Array[ctypes.c_uint32] | None:
    """The memory of a state, if it holds what the generator says of itself."""
    words = (ctypes.c_uint32 * len(expected)).from_address(address)
    return words if list(words) == expected else None


@cache
def _python_words() -> ctypes.Array[ctypes.c_uint32] | None:
    """CPython: the index and the state follow the head of the object, which is never freed."""
    if sys.implementation.name != "cpython":
        return None
    *state, index = random.getstate()[1]
    owner: Any = random.random.__self__  # type: ignore[attr-defined]
    return _words_at(id(owner) + object.__basicsize__, [index, *state])


@cache
def _numpy_words() -> ctypes.Array[ctypes.c_uint32] | None:
    numpy: Any = sys.modules["numpy"]
    kind, state, position, *_ = numpy.random.get_state()
    if kind != "MT19937" or not hasattr(numpy.random, "get_bit_generator"):
        return None
    generator = numpy.random.get_bit_generator()
    return _words_at(generator.ctypes.state_address, [*map(int, state), int(position)])


@cache
def _torch_words() -> ctypes.Array[ctypes.c_uint32] | None:
    """torch's of the CPU: seed, words left, position, words, and the second normal of a pair."""
    generator: Any = torch.default_generator
    with _disable_current_modes():  # such as that of fake tensors, which have no numbers
        state = generator.get_state()
        numbers = [number % 2**32 for number in state.view(torch.int32).tolist()]
        second = bytes(state[5024:5041].tolist())
    expected = [numbers[4], *numbers[6:1254:2]]
    for address in range(generator._cdata, generator._cdata + 512, 4):
        if _words_at(address, expected) is not None:
            words = (ctypes.c_uint32 * (4 + len(expected) + 6)).from_address(address - 16)
            end = bytes(words)[-12:]
            is_end = end[8] == second[16] and (not end[8] or end[:8] == second[:8])
            return words if is_end and words[:3] == numbers[:3] else None
    return None


def save_torch() -> bytes | Tensor:
    """The state of torch's generator of the CPU, for `restore_torch`: its words are all of it."""
    words = _torch_words()
    return torch.default_generator.get_state() if words is None else bytes(words)


def restore_torch(state: bytes | Tensor) -> None:
    if isinstance(state, Tensor):
        torch.default_generator.set_state(state)
        return
    words = _torch_words()
    assert words is not None
    ctypes.memmove(words, state, len(state))


class HostStreams:
    """Those of Python and numpy in this process; numpy's from when it is imported."""

    def __init__(self, with_torch: bool = False, is_drawn_from: bool = True) -> None:
        """`is_drawn_from`: whether all are seeded at first."""
        self._with_torch = with_torch
        self._is_drawn_from = is_drawn_from
        self._all = list[_Stream]()
        self._has_numpy = False

    def save(self) -> list[tuple[_Stream, _Snapshot]]:
        return [(stream, stream.save()) for stream in self._streams()]

    def seeders(self) -> list[Callable[[int], None]]:
        """What seeds the generators that are drawn from."""
        return [stream.seeder() for stream in self._streams() if stream.is_drawn_from]

    def seed(self, seed: int) -> None:
        for put in self.seeders():
            put(seed)

    def restore(self, saved: list[tuple[_Stream, _Snapshot]]) -> bool:
        """Whether one was drawn from, though it was not seeded any more: from now on it is."""
        return any([stream.restore(before) for stream, before in saved])

    def words(self) -> list[bytes] | None:
        """The states in memory, as long as nothing is known to draw from any of them."""
        words = []
        for stream in self._streams():
            if stream.is_drawn_from:
                return None
            words.append(stream.words_now())
        return words

    def undo(self, words: list[bytes]) -> None:
        """Something has drawn after all: return to these states, and remember from which it has."""
        for stream, before in zip(self._streams(), words, strict=False):
            stream.restore(_Snapshot(None, before))

    def park(self, before: Parked) -> Parked:
        """For another worker of this process, which has states of its own."""
        return {stream: stream.park(before.get(stream)) for stream in self._streams()}

    def resume(self, parked: Parked) -> None:
        for stream, state in parked.items():
            stream.resume(state)

    @property
    def are_drawn_from(self) -> bool:
        return any(stream.is_drawn_from for stream in self._streams())

    def _streams(self) -> list[_Stream]:
        if not self._all:
            python = _Stream(random.getstate, random.setstate, random.seed, _python_words())
            self._all = self._begun(python)
            if self._with_torch:
                generator: Any = torch.default_generator
                get = generator.get_state
                put = generator.set_state
                seed = generator.manual_seed
                self._all += self._begun(_Stream(get, put, seed, _torch_words()))
        if not self._has_numpy and "numpy" in sys.modules:
            self._has_numpy = True
            numpy: Any = sys.modules["numpy"].random
            get = numpy.get_state
            put = numpy.set_state
            of_numpy = _Stream(get, put, lambda s: numpy.seed(s % 2**32), _numpy_words())
            self._all = [*self._all, *self._begun(of_numpy)]
        return self._all

    def _begun(self, *streams: _Stream) -> list[_Stream]:
        for stream in streams:
            stream.begin(self._is_drawn_from)
        return list(streams)


host_streams = HostStreams()
