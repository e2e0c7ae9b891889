"""Hashes of row ids: the owner of a row and its initial value, without a table of ids."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from shoal.server.embedding import native

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
        self._keys = np.array([key_of(key, i) for i in range(_ROUNDS)], np.uint64)

    def deal(self, numbers: Ids, shards: int) -> tuple[Ids, Ids]:
        """The permuted numbers dealt to shards in turn: shard and slot of each.

        An IndexError if a number is out of range.
        """
        owners = np.empty_like(numbers)
        slots = np.empty_like(numbers)
        wrong = native.rows.locate(
            self.size,
            self._height,
            self._width,
            self._keys,
            np.ascontiguousarray(numbers),
            shards,
            owners,
            slots,
        )
        if wrong >= 0:
            raise IndexError(f"number {wrong} of {len(numbers)} is out of range")
        return owners, slots


MAX_DIRECT_ROWS = 1 << 20  # of a table, for which an array has an entry for every row


class IdMap:
    """Positions of ids, which ascend, among each other. A look-up allocates nothing per row."""

    def __init__(self, ids: Ids, num_rows: int):
        self.ids = ids
        self.direct: NDArray[np.int32] | None = None  # -1 for rows that are not in the set
        if num_rows <= MAX_DIRECT_ROWS and len(ids):
            self.direct = np.full(num_rows, -1, np.int32)
            self.direct[ids] = np.arange(len(ids), dtype=np.int32)

    def find(self, ids: Ids) -> Ids:
        """Positions of ids of the table; -1 for those that are not in the set."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        if self.direct is not None:
            return self.direct.take(ids).astype(np.int64)
        places = self.ids.searchsorted(ids)
        np.minimum(places, len(self.ids) - 1, out=places)
        places[self.ids[places] != ids] = -1
        return places
