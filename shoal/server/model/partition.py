"""Which server holds which slice of the flat buffer.

    flat   [ p0 .. | p1 ...... | p2 . | p3 ................ ]
    server  0 ---------------> 1 -----------> 2 ------------>
                                         ^ p3 is larger than 1/3 of the buffer: split by rows

Slices are consecutive, so a bucket and a server have one range of elements in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.schedules.buffer_layout import server_edges
from shoal.server.messages import ParameterSlice


class FlatParameter(NamedTuple):
    """One parameter in the flat buffer, in elements."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Elements of one row; a vector's rows are its elements."""
        return math.prod(self.shape[1:])


class ServerSlice(NamedTuple):
    """What one server holds: a range of the flat buffer, and the parameters in it."""

    start: int
    stop: int
    slices: tuple[ParameterSlice, ...]


def partition(
    parameters: Sequence[FlatParameter], size: int, servers: int, by_rows: bool = True
) -> list[ServerSlice]:
    """Divide the buffer into slices of about the same size (`server_edges`)."""
    edges = server_edges(parameters, size, servers, by_rows)
    return [
        ServerSlice(start, stop, tuple(_slices_between(parameters, start, stop)))
        for start, stop in itertools.pairwise(edges)
    ]


def _slices_between(
    parameters: Sequence[FlatParameter], start: int, stop: int
) -> list[ParameterSlice]:
    slices = []
    for i, parameter in enumerate(parameters):
        low = max(start, parameter.start)
        high = min(stop, parameter.stop)
        if low >= high:
            continue
        if (low, high) == (parameter.start, parameter.stop):
            slices.append(ParameterSlice(i, low, 0, parameter.shape))
        else:
            first_row = (low - parameter.start) // parameter.row_size
            rows = (high - low) // parameter.row_size
            slices.append(ParameterSlice(i, low, first_row, (rows, *parameter.shape[1:])))
    return slices
