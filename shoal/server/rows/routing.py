"""Which server is asked for which row: the owner, or for a hot row the least loaded one.

`route` is one native call, and the same in numpy where there is none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.embedding.hashing import IdMap, Ids
from shoal.embedding.spec import TableSpec

try:
    from shoal.embedding._rows import route as _native
except ImportError:  # Shoal was installed without a compiler, or is newer than its native part
    _native = None  # type: ignore[assignment]

MAX_NATIVE_SERVERS = 1024
Numbers = NDArray[np.int64]
_AS_GOOD = 0.97  # of the pulls that a new set would have
_AS_SMALL = 1.25  # times as many rows


class Routed(NamedTuple):
    """The rows of a pull in the order in which servers are asked for them."""

    ids: Ids
    places: Ids  # where they go
    counts: list[int]  # of each server in turn: copies, and then rows that it owns


def route(
    spec: TableSpec, ids: Ids, places: Ids | None, servers: int, hot: IdMap, turn: int
) -> Routed:
    """The requests of a pull. `places=None`: 0, 1, 2, …; BadInput for ids out of range."""
    if _native is None or servers > MAX_NATIVE_SERVERS:
        spec.check(torch.from_numpy(ids))
        return _routed(spec, ids, places, servers, hot, turn)
    owners = None
    width = -(-spec.num_rows // servers)
    if spec.placement == "hash" and servers > 1:
        spec.check(torch.from_numpy(ids))
        owners = spec.locate(torch.from_numpy(ids), servers)[0]
    is_hot = None
    if len(hot.ids) and hot.direct is None:
        spec.check(torch.from_numpy(ids))
        is_hot = hot.find(ids) >= 0
    ordered, ordered_places = np.empty_like(ids), np.empty_like(ids)
    counts = np.empty(2 * servers, np.int64)
    rows = (ids, places, spec.num_rows, width, owners, hot.direct, is_hot, turn)
    if _native(*rows, ordered, ordered_places, counts) >= 0:
        spec.check(torch.from_numpy(ids))
    return Routed(ordered, ordered_places, counts.tolist())


def _routed(
    spec: TableSpec, ids: Ids, places: Ids | None, servers: int, hot: IdMap, turn: int
) -> Routed:
    owners = spec.locate(torch.from_numpy(ids), servers)[0]
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


def hottest_rows(ids: Ids, counts: Numbers, least: float, most_rows: int, hot: Ids) -> Ids:
    """The ids whose counts add up to more than `least`, in order; at most so many of them.

    Half of it keeps those that are `hot` now, so that few rows come and go by chance. All of them
    stay where the new ones are pulled hardly more often: a new set is copied to every server.
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.bincount(inverse, counts, minlength=len(unique))
    is_hot = np.isin(unique, hot, assume_unique=True)
    ranks = sums * (1 + is_hot)
    order = np.argsort(-ranks, kind="stable")[:most_rows]
    chosen = order[ranks[order] > least]
    is_as_good = sums[is_hot].sum() >= _AS_GOOD * sums[chosen].sum() > 0
    if is_as_good and len(hot) <= _AS_SMALL * len(chosen):
        return hot.copy()
    return np.sort(unique[chosen])
