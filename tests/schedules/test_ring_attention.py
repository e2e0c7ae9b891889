"""The schedule of ring attention: every query meets every key once, and the work is balanced."""

from __future__ import annotations

import pytest

from shoal.errors import CheckFailed
from shoal.schedules.collectives.cost import Link
from shoal.schedules.ring_attention import ChunkPair, RingAttention, prove


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_every_query_meets_every_key_it_sees_once(ranks: int) -> None:
    prove(RingAttention(ranks, causal=True))
    prove(RingAttention(ranks, causal=False))


def test_zigzag_gives_every_rank_the_same_causal_work() -> None:
    schedule = RingAttention(4)
    assert [sum(schedule.work(rank)) for rank in range(4)] == [8.0] * 4
    assert {tuple(schedule.work(rank)[1:]) for rank in range(4)} == {(2.0, 2.0, 2.0)}


def test_a_schedule_that_leaves_out_a_pair_is_refused() -> None:
    class Lazy(RingAttention):
        def pairs(self, rank: int, owner: int) -> list[ChunkPair]:
            return super().pairs(rank, owner)[:1]

    with pytest.raises(CheckFailed, match="queries of chunk"):
        prove(Lazy(2))


def test_transfers_are_hidden_behind_enough_work() -> None:
    schedule = RingAttention(2)
    slow = Link(alpha_s=0.0, beta_s_per_byte=1.0)
    assert schedule.time_s(block_bytes=10.0, pair_s=100.0, link=slow) == 400.0
    assert schedule.time_s(block_bytes=10.0, pair_s=1.0, link=slow) > 10.0
