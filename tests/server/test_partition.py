"""Who holds what: everything once, cut at boundaries, balanced."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.server.model.partition import Cutting, Place, Slice, cut

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


def places_of(shapes: list[tuple[int, ...]], offset: int) -> tuple[list[Place], int]:
    places = []
    at = offset
    for i, shape in enumerate(shapes):
        places.append(Place(f"p{i}", at, shape))
        at = -(-(at + math.prod(shape)) // 4) * 4
    return places, at


def test_two_servers_and_a_matrix_larger_than_a_fair_share() -> None:
    places = [Place("a", 4, (2, 2)), Place("b", 8, (8, 2)), Place("c", 24, (4,))]
    assert cut(places, 28, 2) == [
        Slice(4, 16, (Cutting(0, 4, 0, (2, 2)), Cutting(1, 8, 0, (4, 2)))),
        Slice(16, 28, (Cutting(1, 16, 4, (4, 2)), Cutting(2, 24, 0, (4,)))),
    ]


def test_without_rows_only_boundaries_of_parameters_count() -> None:
    places = [Place("a", 4, (2, 2)), Place("b", 8, (8, 2)), Place("c", 24, (4,))]
    assert [(s.start, s.stop) for s in cut(places, 28, 2, by_rows=False)] == [(4, 8), (8, 28)]


@given(shapes, st.integers(1, 5), st.sampled_from([0, 16]), st.booleans())
def test_every_element_is_held_once(
    shapes: list[tuple[int, ...]], servers: int, offset: int, by_rows: bool
) -> None:
    places, size = places_of(shapes, offset)
    slices = cut(places, size, servers, by_rows)
    assert len(slices) == servers
    assert slices[0].start == offset and slices[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    for i, place in enumerate(places):
        held = [c for s in slices for c in s.cuttings if c.parameter == i]
        assert sum(math.prod(c.shape) for c in held) == math.prod(place.shape)
        rows = [r for c in held for r in range(c.first_row, c.first_row + c.shape[0])]
        assert rows == list(range(place.shape[0]))
        assert all(c.start == place.start + c.first_row * place.row for c in held)


@given(shapes, st.integers(1, 5))
def test_slices_differ_by_no_more_than_what_cannot_be_cut(
    shapes: list[tuple[int, ...]], servers: int
) -> None:
    places, size = places_of(shapes, 0)
    fair = size / servers
    grains = [p.row if math.prod(p.shape) > fair else math.prod(p.shape) for p in places]
    for held in cut(places, size, servers):
        assert held.stop - held.start <= fair + max(grains) + 4
