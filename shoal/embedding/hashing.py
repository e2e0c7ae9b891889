"""Hashes of row ids: where a row lives, and what it starts as. Both need no table of ids."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4


def key_of(*parts: object) -> int:
    """64 bits that depend on all parts; the same on every machine and in every run."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def scramble(words: Words) -> Words:
    """A bijection of 64-bit words whose output bits each depend on all input bits (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(ids: Ids, columns: int, key: int) -> Words:
    """[n, columns] random words; each depends on its id, its column and the key alone."""
    rows = scramble(ids.astype(np.uint64) * _GOLDEN + np.uint64(key))
    steps = np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN
    return scramble(rows[:, None] + steps)


class Permutation:
    """Shuffles the numbers [0, size) without memory: 4 rounds of hashing a number.

    A number is taken for a pair, x = left * width + right, and each half in turn is moved on by
    a hash of the other, which can be undone and is therefore one-to-one. The pairs are a few
    more than `size`: a number that falls outside goes round again until it is inside.
    """

    def __init__(self, size: int, key: int):
        self.size = size
        self._height = math.isqrt(max(0, size - 1)) + 1
        self._width = max(1, -(-size // self._height))
        self._keys = [np.uint64(key_of(key, i)) for i in range(_ROUNDS)]

    def __call__(self, numbers: Ids) -> Ids:
        found = self._shuffle(numbers)
        while (outside := np.flatnonzero(found >= self.size)).size:
            found[outside] = self._shuffle(found[outside])
        return found

    def _shuffle(self, numbers: Ids) -> Ids:
        left, right = np.divmod(numbers, self._width)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                left = _moved(left, right, key, self._height)
            else:
                right = _moved(right, left, key, self._width)
        return left * self._width + right


def _moved(half: Ids, other: Ids, key: np.uint64, size: int) -> Ids:
    """`half` moved on, modulo `size`, by a hash of `other`."""
    high: Words = scramble(other.astype(np.uint64) ^ key) >> np.uint64(32)
    moved = half + ((high * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    moved -= size * (moved >= size)
    return moved
