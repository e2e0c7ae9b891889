"""Who holds a shard, what moves when the ranks change, and memory that is lent to buckets."""

from __future__ import annotations

import itertools

import pytest

from shoal.schedules.buffer_layout import (
    FilledBucket,
    ShardTransfer,
    held_shards,
    holders,
    most_gradients,
    shard_transfers,
    surviving_holders,
    times_settled,
)


def test_a_shard_is_on_its_owner_and_on_the_rank_that_follows() -> None:
    assert [held_shards(rank, 3, copies=1) for rank in range(3)] == [[0, 2], [1, 0], [2, 1]]
    assert [holders(shard, 3, copies=1) for shard in range(3)] == [[0, 1], [1, 2], [2, 0]]
    assert held_shards(0, 2, copies=5) == [0, 1]


def test_what_moves_when_rank_1_of_3_is_lost() -> None:
    """Parameters 0, 1, 2 are the shards 0, 1, 2; then 0 and 1 are shard 0, and 2 is shard 1."""
    held_by = surviving_holders([0, 1, 2], 3, 1, earlier_ranks=[0, 2])
    assert held_by == [[0], [1], [0, 1]]
    moved = shard_transfers(held_by, owners=[0, 0, 1], ranks=2, copies=1)
    assert moved == [ShardTransfer(0, 1, 0), ShardTransfer(1, 0, 1)]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_as_many_ranks_as_there_are_copies_may_be_lost(ranks: int, copies: int) -> None:
    for lost in itertools.combinations(range(ranks), copies):
        left = [rank for rank in range(ranks) if rank not in lost]
        assert all(surviving_holders(range(ranks), ranks, copies, left))
    left = list(range(copies + 1, ranks))
    assert surviving_holders(range(ranks), ranks, copies, left)[0] == []


ROOM = 20.0


def test_a_third_large_bucket_waits_for_the_first_and_small_ones_do_not() -> None:
    assert times_settled([10, 10, 10, 10], ROOM) == 2
    assert times_settled([30, 30], ROOM) == 0
    assert times_settled([2] * 10, ROOM) == 0


def test_two_buckets_on_their_way_stand_beside_the_gradients_of_the_third() -> None:
    others = [FilledBucket(10, 10, is_own=False)] * 3
    assert most_gradients(others, 1, ROOM) == 2 * 10 + 10


def test_an_owner_keeps_its_bucket_from_when_it_comes() -> None:
    others = [FilledBucket(10, 10, is_own=False)] * 3
    first = [FilledBucket(10, 10, is_own=True), *others]
    assert most_gradients(first, 1, ROOM) == 10 + 2 * 10 + 10
    large_first = [FilledBucket(10, 40, is_own=True), *others]
    assert most_gradients(large_first, 1, ROOM) == 10 + 40
    assert most_gradients(large_first, 2, ROOM) == 10 + 2 * 10 + 40
