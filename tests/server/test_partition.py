"""Which server holds what: every element once, split at boundaries, balanced."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.server.messages import ParameterSlice
from shoal.server.model.partition import FlatParameter, ServerSlice, partition

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


def parameters_of(shapes: list[tuple[int, ...]], offset: int) -> tuple[list[FlatParameter], int]:
    parameters = []
    at = offset
    for i, shape in enumerate(shapes):
        parameters.append(FlatParameter(f"p{i}", at, shape))
        at = -(-(at + math.prod(shape)) // 4) * 4
    return parameters, at


ABC = [FlatParameter("a", 4, (2, 2)), FlatParameter("b", 8, (8, 2)), FlatParameter("c", 24, (4,))]


def test_two_servers_and_a_matrix_larger_than_an_equal_slice() -> None:
    assert partition(ABC, 28, 2) == [
        ServerSlice(4, 16, (ParameterSlice(0, 4, 0, (2, 2)), ParameterSlice(1, 8, 0, (4, 2)))),
        ServerSlice(16, 28, (ParameterSlice(1, 16, 4, (4, 2)), ParameterSlice(2, 24, 0, (4,)))),
    ]


def test_without_rows_only_boundaries_of_parameters_count() -> None:
    slices = partition(ABC, 28, 2, by_rows=False)
    assert [(each.start, each.stop) for each in slices] == [(4, 8), (8, 28)]


@given(shapes, st.integers(1, 5), st.sampled_from([0, 16]), st.booleans())
def test_every_element_is_held_once(
    shapes: list[tuple[int, ...]], servers: int, offset: int, by_rows: bool
) -> None:
    parameters, size = parameters_of(shapes, offset)
    slices = partition(parameters, size, servers, by_rows)
    assert len(slices) == servers
    assert slices[0].start == offset and slices[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    for i, parameter in enumerate(parameters):
        held = [c for s in slices for c in s.slices if c.parameter == i]
        assert sum(math.prod(c.shape) for c in held) == math.prod(parameter.shape)
        rows = [r for c in held for r in range(c.first_row, c.first_row + c.shape[0])]
        assert rows == list(range(parameter.shape[0]))
        assert all(c.start == parameter.start + c.first_row * parameter.row_size for c in held)


@given(shapes, st.integers(1, 5))
def test_slices_differ_by_no_more_than_what_cannot_be_split(
    shapes: list[tuple[int, ...]], servers: int
) -> None:
    parameters, size = parameters_of(shapes, 0)
    fair = size / servers
    grains = [p.row_size if math.prod(p.shape) > fair else math.prod(p.shape) for p in parameters]
    for held in partition(parameters, size, servers):
        assert held.stop - held.start <= fair + max(grains) + 4
