"""Hashes of row ids: the owner of a row and its initial value, without a table of ids."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4


def key_of(*values: object) -> int:
    """64 bits that depend on all values; the same on every machine and in every run."""
    text = "\0".join(map(str, values)).encode()
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
    """A random permutation of [0, size) that is computed, not stored: a 4-round Feistel network.

    A number is a pair, x = left * width + right. Each half in turn is shifted by a hash of the
    other, which is invertible. There are a few more pairs than `size`: a result outside of the
    range is permuted again until it is inside (cycle walking).
    """

    def __init__(self, size: int, key: int):
        self.size = size
        self._height = math.isqrt(max(0, size - 1)) + 1
        self._width = max(1, -(-size // self._height))
        self._keys = [np.uint64(key_of(key, i)) for i in range(_ROUNDS)]

    def __call__(self, numbers: Ids) -> Ids:
        shuffled = self._shuffle(numbers)
        while (outside := np.flatnonzero(shuffled >= self.size)).size:
            shuffled[outside] = self._shuffle(shuffled[outside])
        return shuffled

    def _shuffle(self, numbers: Ids) -> Ids:
        left, right = np.divmod(numbers, self._width)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                left = _shift(left, right, key, self._height)
            else:
                right = _shift(right, left, key, self._width)
        return left * self._width + right


def _shift(half: Ids, other: Ids, key: np.uint64, size: int) -> Ids:
    """`half` plus a hash of `other`, modulo `size`."""
    high: Words = scramble(other.astype(np.uint64) ^ key) >> np.uint64(32)
    shifted = half + ((high * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    shifted -= size * (shifted >= size)
    return shifted
