"""The global random generators of Python and numpy, which a forward may draw from.

A step seeds them before each forward and restores them afterwards. To read and write such a state
takes tens to hundreds of microseconds, and hardly any forward draws from it. So a generator that a
forward has left alone is not seeded any more: the 2.5 KB of its Mersenne twister are compared in
memory before and behind a step, and one that is drawn from is seeded from then on.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_WORDS = 624


class _Snapshot(NamedTuple):
    state: Any  # None: of a generator that nothing draws from
    words: bytes


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
        self._is_drawn_from = True  # until a step shows that it is not
        self._stays = words is None  # it was seen to be drawn from
        self._seeded: bytes | None = None

    def save(self) -> _Snapshot:
        self._seeded = None
        return _Snapshot(self._get() if self._is_drawn_from else None, self._now())

    def seed(self, seed: int) -> None:
        if self._is_drawn_from:
            self._seed(seed)
            self._seeded = self._now()

    def restore(self, before: _Snapshot) -> None:
        now = self._now()
        if before.state is None:
            if now != before.words and self._words is not None:
                ctypes.memmove(self._words, before.words, len(before.words))
                self._is_drawn_from = self._stays = True
            return
        if self._seeded is not None:
            self._stays |= now != self._seeded
            self._is_drawn_from = self._stays
        self._put(before.state)

    def _now(self) -> bytes:
        return b"" if self._words is None else bytes(self._words)


def _words_at(address: int, expected: list[int]) -> ctypes.Array[ctypes.c_uint32] | None:
    """The memory of a state, if it holds what the generator says of itself."""
    words = (ctypes.c_uint32 * len(expected)).from_address(address)
    return words if list(words) == expected else None


def _of_python() -> _Stream:
    """CPython: the index and the state follow the head of the object, which is never freed."""
    words = None
    if sys.implementation.name == "cpython":
        *state, index = random.getstate()[1]
        owner: Any = random.random.__self__  # type: ignore[attr-defined]
        words = _words_at(id(owner) + object.__basicsize__, [index, *state])
    return _Stream(random.getstate, random.setstate, random.seed, words)


def _of_numpy(numpy: Any) -> _Stream:
    get = numpy.random.get_state
    kind, state, position, *_ = get()
    words = None
    if kind == "MT19937" and hasattr(numpy.random, "get_bit_generator"):
        generator = numpy.random.get_bit_generator()
        words = _words_at(generator.ctypes.state_address, [*map(int, state), int(position)])
    return _Stream(get, numpy.random.set_state, lambda s: numpy.random.seed(s % 2**32), words)


class HostStreams:
    """Those of this process; numpy's from when it is imported."""

    def __init__(self) -> None:
        self._python: _Stream | None = None
        self._numpy: _Stream | None = None

    def save(self) -> list[tuple[_Stream, _Snapshot]]:
        return [(stream, stream.save()) for stream in self._streams()]

    def seed(self, seed: int) -> None:
        for stream in self._streams():
            stream.seed(seed)

    def restore(self, saved: list[tuple[_Stream, _Snapshot]]) -> None:
        for stream, before in saved:
            stream.restore(before)

    def _streams(self) -> list[_Stream]:
        if self._python is None:
            self._python = _of_python()
        if self._numpy is None and "numpy" in sys.modules:
            self._numpy = _of_numpy(sys.modules["numpy"])
        return [stream for stream in (self._python, self._numpy) if stream is not None]


host_streams = HostStreams()
