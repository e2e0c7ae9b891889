"""Where a buffer of tensors is cut into shards: a plan and the runtime have to agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Position = TypeVar("Position", int, float)


def shard_edges(boundaries: Sequence[Position], shards: int) -> list[Position]:
    """The edges of consecutive shards, each at the boundary nearest to an equal division.

    A shard may be empty where there are fewer tensors than shards.
    """
    first = boundaries[0]
    span = boundaries[-1] - first
    edges = [first]
    for k in range(1, shards):
        target = first + span * k / shards
        nearest = min(boundaries, key=lambda edge: abs(edge - target))
        edges.append(max(nearest, edges[-1]))
    edges.append(boundaries[-1])
    return edges
