"""All-reduce in levels: inside the node, between nodes, and between racks.

    node 0      node 1
    0 1 2 3     4 5 6 7     1. inside: reduce-scatter, so each rank answers for one shard
    | | | |     | | | |     2. between: shard s is all-reduced among the ranks that answer for it
    +-+-+-+-----+-+-+-+     3. inside: all-gather

With `inner="star"` or `"tree"` a node reduces to its first rank, only these leaders
communicate, and each broadcasts the result in its node. The last node may be smaller than
the others; its ranks then answer for several shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadInput
from shoal.runtime.wording import nearest
from shoal.schedules.collectives import Collective, direct, doubling
from shoal.schedules.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from shoal.schedules.collectives.transfer_table import EMPTY, TransferTable
from shoal.schedules.collectives.tree import tree_broadcast, tree_reduce

Make = Callable[[int], Collective]

INNER: dict[str, tuple[Make, Make]] = {
    "ring": (ring_reduce_scatter, ring_all_gather),
    "halving": (doubling.halving_reduce_scatter, doubling.doubling_all_gather),
    "direct": (direct.direct_reduce_scatter, direct.direct_all_gather),
    "star": (direct.star_reduce, direct.star_broadcast),
    "tree": (tree_reduce, tree_broadcast),
}
_LEADING = ("star", "tree")  # only the first rank of a node communicates with others


def hierarchical_all_reduce(
    ranks: int,
    node: int | None = None,
    rack: int | None = None,
    inner: str = "ring",
    outer: Make = doubling.halving_all_reduce,
    name: str = "hierarchical",
) -> Collective:
    """Nodes of `node` ranks, racks of `rack` nodes; `outer` is any all-reduce.

    With m ranks a node and n nodes, a ring inside and halving between: 2(m-1) + 2 log2 n rounds;
    each rank sends 2(p-1)V/p bytes, of which only 2(n-1)V/p leave the node. `node` is by default
    the divisor of p just above its root. With a rack level the nodes of a rack do `inner` too,
    and `outer` is between racks.
    """
    root = math.ceil(math.sqrt(ranks))
    near_root = next((d for d in range(root, ranks) if ranks % d == 0), root)
    size = min(node or near_root, ranks)
    if inner not in INNER:
        raise BadInput(f"there is no inner algorithm {inner!r}; {nearest(inner, INNER)}")
    shards = 1 if inner in _LEADING else size  # that a node is divided into
    first, second = INNER[inner]
    nodes = [np.arange(start, min(start + size, ranks)) for start in range(0, ranks, size)]
    if rack is not None:
        outer = partial(hierarchical_all_reduce, node=rack, inner=inner, outer=outer)
    between = outer(len(nodes))
    chunks = shards * between.chunks
    even = ranks % size == 0
    table = _inside(first, nodes, shards, between.chunks).then(
        _between(between, nodes, shards), _inside(second, nodes, shards, between.chunks)
    )
    return Collective(
        name,
        ranks,
        chunks,
        table,
        same_bits=between.same_bits,
        one_port=between.one_port and first(2).one_port and (even or shards == 1),
        scratch=math.ceil(between.scratch / between.chunks) * chunks,
    )


def torus_all_reduce(ranks: int, columns: int | None = None) -> Collective:
    """A 2-D torus: reduce-scatter along the rows, all-reduce along the columns, and back.

    r x c ranks: 2(r-1) + 2(c-1) rounds instead of 2(p-1); each rank sends 2(p-1)V/p bytes, to
    its two right neighbours only. As square as p allows; for a prime it is the ring.

        0 - 1 - 2        rows:     0-1-2  3-4-5
        |   |   |        columns:  0-3    1-4    2-5
        3 - 4 - 5
    """
    narrow = next(d for d in range(math.isqrt(ranks), 0, -1) if ranks % d == 0)
    width = columns or ranks // narrow
    if ranks % width:
        raise BadInput(f"a torus of {ranks} ranks cannot have {width} columns")
    return hierarchical_all_reduce(ranks, node=width, outer=ring_all_reduce, name="torus")


def _inside(
    make: Make, nodes: list[NDArray[np.int64]], shards: int, per_shard: int
) -> TransferTable:
    """`make`'s schedule in every node at once."""
    tables = []
    full = [members for members in nodes if members.size == nodes[0].size]
    for group in (full, nodes[len(full) :]):
        if group and group[0].size > 1:
            tables.append(_embed(make(group[0].size), np.stack(group), shards, per_shard))
    return EMPTY.beside(*tables)


def _embed(
    inner: Collective, members: NDArray[np.int64], shards: int, per_shard: int
) -> TransferTable:
    """Piece i of `inner` is the run of shards that member i answers for; runs may differ."""
    owner = np.arange(shards) * inner.chunks // shards
    runs = [np.flatnonzero(owner == piece) for piece in range(inner.chunks)]
    longest = max(run.size for run in runs)
    padded = np.array([np.pad(run, (0, longest - run.size), constant_values=-1) for run in runs])
    chunks = padded[:, :, None] * per_shard + np.arange(per_shard)
    chunks = np.where(padded[:, :, None] < 0, -1, chunks).reshape(inner.chunks, -1)
    table = inner.table.embedded(members, np.broadcast_to(chunks, (len(members), *chunks.shape)))
    return table.only(table.chunk >= 0)


def _between(outer: Collective, nodes: list[NDArray[np.int64]], shards: int) -> TransferTable:
    """`outer`'s schedule for every shard at once, among the ranks that answer for it."""
    shard = np.arange(shards)
    members = np.stack([m[shard * m.size // shards] for m in nodes], axis=1)
    layer, slot = np.divmod(np.arange(outer.slots), outer.chunks)
    chunks = layer * shards * outer.chunks + shard[:, None] * outer.chunks + slot
    return outer.table.embedded(members, chunks[:, :, None])
