"""The space-saving sketch against exact counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.server.embedding.heat import SpaceSaving

batches = st.lists(st.lists(st.integers(0, 30), max_size=40), max_size=12)


def counted(capacity: int, stream: list[list[int]]) -> SpaceSaving:
    sketch = SpaceSaving(capacity)
    for batch in stream:
        sketch.add(np.array(batch, np.int64))
        sketch.hottest()  # what waits is counted: every batch takes its own place
    return sketch


def check(sketch: SpaceSaving, exact: Counter[int], bound: float) -> None:
    """Both bounds of the sketch, and that no id over the bound is missing."""
    found = sketch.hottest()
    assert sketch.total == sum(exact.values())
    assert len(found.ids) <= sketch.capacity
    assert sketch.floor <= bound
    for row, count, error in zip(*(each.tolist() for each in found), strict=True):
        assert 0 <= error <= sketch.floor
        assert count - error <= exact[row] <= count
    for row in exact.keys() - set(found.ids.tolist()):
        assert exact[row] <= sketch.floor
    assert found.counts.tolist() == sorted(found.counts.tolist(), reverse=True)


@given(stream=batches, capacity=st.integers(1, 12) | st.just(31))
@settings(max_examples=40, deadline=None)
def test_counts_are_within_their_bounds(stream: list[list[int]], capacity: int) -> None:
    exact = Counter(row for batch in stream for row in batch)
    sketch = counted(capacity, stream)
    check(sketch, exact, exact.total() / capacity)
    assert len(exact) > capacity or not sketch.hottest().errors.any(), "exact if there is room"


@given(first=batches, second=batches, capacity=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_two_sketches_make_one(
    first: list[list[int]], second: list[list[int]], capacity: int
) -> None:
    sketch = counted(capacity, first)
    sketch.merge(counted(capacity, second))
    exact = Counter(row for batch in first + second for row in batch)
    check(sketch, exact, 2 * exact.total() / capacity)


def test_a_long_stream_takes_bounded_memory_and_finds_its_hottest() -> None:
    random = np.random.RandomState(0)
    sketch = SpaceSaving(200)
    exact: Counter[int] = Counter()
    for _ in range(60):
        ids = random.zipf(1.3, 5000).astype(np.int64)
        sketch.add(ids)
        exact.update(ids.tolist())
    check(sketch, exact, exact.total() / 200)
    assert sketch.hottest(10).ids.tolist() == [row for row, _ in exact.most_common(10)]
