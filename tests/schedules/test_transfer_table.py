from __future__ import annotations

import pytest

from shoal.schedules.collectives.collective import Collective, rooted_at
from shoal.schedules.collectives.transfer_table import Transfer as T
from shoal.schedules.collectives.transfer_table import from_rounds, rows

ONE = [[T(0, 1, 0, False)], [T(1, 2, 0, True), T(0, 2, 1, False, into=3)]]


def test_a_table_reads_like_the_rounds_it_was_made_of() -> None:
    table = from_rounds(ONE)
    assert table == tuple(map(tuple, ONE)) and len(table) == 2 and table.num_transfers == 3
    assert table[-1] == tuple(ONE[1]) and table[:1] == (tuple(ONE[0]),)
    with pytest.raises(IndexError):
        table[2]


def test_then_puts_rounds_after_each_other_and_beside_puts_them_together() -> None:
    one = from_rounds(ONE)
    other = from_rounds([[T(3, 4, 0, True)]])
    assert one.then(other) == (*one, *other)
    assert one.beside(other) == ((*one[0], *other[0]), one[1])


def test_reversed_turns_a_broadcast_into_a_reduce() -> None:
    spread = from_rounds([[T(0, 1, 0, False)], [T(0, 2, 0, False), T(1, 3, 0, False)]])
    assert spread.reversed(reduce=True) == (
        (T(2, 0, 0, True), T(3, 1, 0, True)),
        (T(1, 0, 0, True),),
    )


def test_rows_are_broadcast_and_sorted_by_round() -> None:
    table = rows([1, 0], [0, 1], 2, 0, True)
    assert table == ((T(1, 2, 0, True),), (T(0, 2, 0, True),))


def test_embedded_runs_one_schedule_in_many_places() -> None:
    pair = from_rounds([[T(0, 1, 0, True)]])
    twice = pair.embedded([[0, 1], [2, 3]], [[[0]], [[1]]])
    assert twice == ((T(0, 1, 0, True), T(2, 3, 1, True)),)


def test_a_gather_with_another_root_turns_ranks_and_pieces() -> None:
    star = Collective("star", 3, 3, [[T(1, 0, 1, False), T(2, 0, 2, False)]], "gather")
    assert rooted_at(star, 1).rounds == ((T(2, 1, 2, False), T(0, 1, 0, False)),)
