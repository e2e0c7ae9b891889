from __future__ import annotations

import pytest

from shoal.schedules.collectives import Collective, rooted_at
from shoal.schedules.collectives.transfer_table import Transfer as T
from shoal.schedules.collectives.transfer_table import from_rounds

ONE = [[T(0, 1, 0, False)], [T(1, 2, 0, True), T(0, 2, 1, False, into=3)]]


def test_a_table_reads_like_the_rounds_it_was_made_of() -> None:
    table = from_rounds(ONE)
    assert table == tuple(map(tuple, ONE)) and len(table) == 2 and table.num_transfers == 3
    assert table[-1] == tuple(ONE[1]) and table[:1] == (tuple(ONE[0]),)
    with pytest.raises(IndexError):
        table[2]


def test_a_gather_with_another_root_turns_ranks_and_pieces() -> None:
    star = Collective("star", 3, 3, [[T(1, 0, 1, False), T(2, 0, 2, False)]], "gather")
    assert rooted_at(star, 1).rounds == ((T(2, 1, 2, False), T(0, 1, 0, False)),)
