"""Memory that is lent to buckets."""

from __future__ import annotations

from shoal.schedules.buffer_layout import FilledBucket, fitting, most_lent, times_settled

ROOM = 20.0


def test_a_third_large_bucket_waits_for_the_first_and_small_ones_do_not() -> None:
    assert times_settled([10, 10, 10, 10], ROOM) == 2
    assert times_settled([30, 30], ROOM) == 0
    assert times_settled([2] * 10, ROOM) == 0


def test_the_smallest_kept_memory_that_fits_is_lent() -> None:
    assert fitting([30, 10, 20], 15) == 2
    assert fitting([30, 10, 20], 40) is None


def test_kept_memory_stands_beside_the_first_gradients_of_the_next_step() -> None:
    buckets = [FilledBucket(10, 10, is_own=True), *[FilledBucket(10, 10, is_own=False)] * 3]
    assert most_lent(buckets, 1, ROOM, reused=100) == 2 * 10 + 10
    large_first = [FilledBucket(10, 40, is_own=True), *[FilledBucket(10, 10, is_own=False)] * 3]
    assert most_lent(large_first, 1, ROOM, reused=100) == 40
    assert most_lent(large_first, 1, ROOM, reused=5) == 40 + 2 * 10
