"""What the native calls for rows of embeddings compute, in numpy."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.server.embedding.hashing import IdMap, Ids, Words, key_of, scramble
from shoal.server.embedding.spec import TableSpec
from shoal.server.rows.requests import Numbers, Routed

ROUNDS = 4


def deal_in_numpy(size: int, key: int, numbers: Ids, shards: int) -> tuple[Ids, Ids]:
    """A Feistel network over [0, size), and its results dealt to shards in turn."""
    height = math.isqrt(max(0, size - 1)) + 1
    width = max(1, -(-size // height))
    keys = np.array([key_of(key, i) for i in range(ROUNDS)], np.uint64)

    def shuffle(given: Ids) -> Ids:
        left, right = np.divmod(given, width)
        for i, each in enumerate(keys):
            if i % 2 == 0:
                left = shift(left, right, each, height)
            else:
                right = shift(right, left, each, width)
        return left * width + right

    shuffled = shuffle(numbers)
    while (outside := np.flatnonzero(shuffled >= size)).size:
        shuffled[outside] = shuffle(shuffled[outside])
    slots, owners = np.divmod(shuffled, shards)
    return owners, slots


def shift(half: Ids, other: Ids, key: np.uint64, size: int) -> Ids:
    """`half` plus a hash of `other`, modulo `size`."""
    high: Words = scramble(other.astype(np.uint64) ^ key) >> np.uint64(32)
    shifted = half + ((high * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    shifted -= size * (shifted >= size)
    return shifted


def route_in_numpy(
    spec: TableSpec, ids: Ids, places: Ids | None, servers: int, hot: IdMap, turn: int
) -> Routed:
    key = key_of("owner", spec.name)
    owners = spec.locate(torch.from_numpy(ids), servers)[0]
    if spec.placement == "hash" and servers > 1:
        owners = deal_in_numpy(spec.num_rows, key, ids, servers)[0]
    targets = spread(owners, hot.find(ids) >= 0, servers, turn) if len(hot.ids) else owners
    keys = 2 * targets + (owners == targets)
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    counts = np.bincount(keys, minlength=2 * servers).tolist()
    return Routed(ids[order], order if places is None else places[order], counts)


def spread(owners: Ids, is_hot: NDArray[np.bool_], servers: int, turn: int) -> Numbers:
    """The server to ask for each row of a pull, so that servers get equally many rows.

    Rows that are not hot are asked of their owners. Hot ones fill up the others, in an order that
    changes with `turn`.
    """
    loads = np.bincount(owners[~is_hot], minlength=servers)
    shares = fill(loads, int(is_hot.sum()))
    hot = np.roll(np.repeat(np.arange(servers), shares), turn)
    targets = owners.copy()
    targets[is_hot] = hot
    return targets


def fill(loads: Numbers, amount: int) -> Numbers:
    """Portions of `amount` that make loads as even as they can be; the sum is `amount`."""
    order = np.argsort(loads, kind="stable")
    ordered = loads[order]
    total = amount
    for count in range(len(loads), 0, -1):  # the `count` smallest loads are filled to one level
        total = amount + int(ordered[:count].sum())
        if count == 1 or total >= count * ordered[count - 1]:
            break
    level, rest = divmod(total, count)
    portions = np.zeros(len(loads), np.int64)
    portions[order[:count]] = level - ordered[:count]
    portions[order[:rest]] += 1
    return portions
