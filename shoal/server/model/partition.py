"""Which server holds which part of the flat buffer.

    flat   [ p0 .. | p1 ...... | p2 . | p3 ................ ]
    server  0 ---------------> 1 -----------> 2 ------------>
                                         ^ p3 is larger than a fair share: cut by rows

Slices are consecutive, so what a bucket and a server have in common is one run of elements.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """One parameter in the flat buffer, in elements."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one row; a vector's rows are its elements."""
        return math.prod(self.shape[1:])


class Cutting(NamedTuple):
    """The rows of one parameter that one server holds."""

    parameter: int
    start: int  # in the flat buffer
    first_row: int
    shape: tuple[int, ...]


class Slice(NamedTuple):
    """What one server holds: a run of the flat buffer, and the parameters in it."""

    start: int
    stop: int
    cuttings: tuple[Cutting, ...]


def cut(places: Sequence[Place], size: int, servers: int, by_rows: bool = True) -> list[Slice]:
    """Divide the buffer into as equal parts as boundaries of parameters allow.

    A parameter larger than a fair share is cut between rows, where `by_rows` allows it. A slice
    may be empty when there is too little to share out.
    """
    first = places[0].start
    fair = (size - first) / servers
    boundaries = [first, size]
    for place in places:
        boundaries.append(place.start)
        if by_rows and place.stop - place.start > fair and place.row:
            boundaries += range(place.start, place.stop, place.row)
    boundaries.sort()
    cuts = [first]
    for k in range(1, servers):
        cuts.append(max(cuts[-1], _nearest(boundaries, first + fair * k)))
    cuts.append(size)
    return [
        Slice(start, stop, tuple(_inside(places, start, stop)))
        for start, stop in itertools.pairwise(cuts)
    ]


def _nearest(ordered: Sequence[int], target: float) -> int:
    i = bisect.bisect_left(ordered, target)
    return min(ordered[max(0, i - 1) : i + 1], key=lambda b: abs(b - target))


def _inside(places: Sequence[Place], start: int, stop: int) -> list[Cutting]:
    found = []
    for i, place in enumerate(places):
        low = max(start, place.start)
        high = min(stop, place.stop)
        if low >= high:
            continue
        if (low, high) == (place.start, place.stop):
            found.append(Cutting(i, low, 0, place.shape))
        else:
            rows = (high - low) // place.row
            found.append(
                Cutting(i, low, (low - place.start) // place.row, (rows, *place.shape[1:]))
            )
    return found
