from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.members.elastic_sum import ElasticSum, SurvivorSum
from shoal.errors import Desync, PeerLost


def together(
    size: int, body: Callable[[int], list[SurvivorSum]], ranks: list[int] | None = None
) -> list[list[SurvivorSum]]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, ranks if ranks is not None else range(size)))


def test_a_whole_group_adds_up_everything_each_time(tmp_path: Path) -> None:
    def body(rank: int) -> list[SurvivorSum]:
        elastic = ElasticSum(tmp_path, rank, lambda _: False)
        return [elastic.all_reduce([rank, 0.5, call], range(3)) for call in (1, 2, 3)]

    expected = [SurvivorSum([3.0, 1.5, 3.0 * call], ()) for call in (1, 2, 3)]
    assert together(3, body) == [expected] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3-0.json", "3-1.json", "3-2.json"]


def test_numbers_arrive_to_the_last_bit(tmp_path: Path) -> None:
    numbers = [0.1, 1e-320, float("inf"), 2.0**53 + 2]
    assert ElasticSum(tmp_path, 0, lambda _: False).all_reduce(numbers, [0]).numbers == numbers


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_survivors_find_the_same_whenever_others_are_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A rank writes in its first `written` rounds, is then recorded as exited, and stays away."""
    size = data.draw(st.integers(2, 4))
    lost = data.draw(st.dictionaries(st.integers(1, size - 1), st.integers(0, 3)))
    folder = tmp_path_factory.mktemp("elastic")
    exited = {rank: threading.Event() for rank in range(size)}

    def body(rank: int) -> list[SurvivorSum]:
        elastic = ElasticSum(folder, rank, lambda other: exited[other].is_set())
        found: list[SurvivorSum] = []
        for _ in range(lost.get(rank, 3)):
            found.append(elastic.all_reduce([2.0**rank], range(size)))
        if rank in lost:
            exited[rank].set()
        return found

    results = together(size, body)
    for i in range(3):
        there = [rank for rank in range(size) if lost.get(rank, 3) > i]
        missing = tuple(rank for rank in range(size) if rank not in there)
        expected = SurvivorSum([float(sum(2**rank for rank in there))], missing)
        assert [found[i] for rank, found in enumerate(results) if rank in there] == [
            expected
        ] * len(there)


def test_what_a_rank_wrote_before_it_was_lost_counts(tmp_path: Path) -> None:
    """It writes and exits between two looks: the exit is read first, so nothing is missed."""
    looks = 0

    def has_exited(rank: int) -> bool:
        nonlocal looks
        looks += rank == 1
        if looks == 2:  # after the first look at the file, which was not there
            (tmp_path / "1-1.json").write_text("[5.0]")
        return looks >= 2

    assert ElasticSum(tmp_path, 0, has_exited).all_reduce([1.0], [0, 1]) == SurvivorSum([6.0], ())


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    (tmp_path / "1-1.json").write_text("[5.0]")
    elastic = ElasticSum(tmp_path, 0, lambda _: False, patience_s=0.01)
    with pytest.raises(PeerLost, match=r"^rank 0 lost rank 2 after 0.01 s in .* ranks 2 and 3 ne"):
        elastic.all_reduce([1.0], range(4))


@pytest.mark.parametrize("theirs", ["[1.0, 2.0]", '{"a": 1}', "[]"])
def test_ranks_that_sum_other_lengths_are_refused(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "1-1.json").write_text(theirs)
    length = len(json.loads(theirs)) if theirs.startswith("[") else 0
    with pytest.raises(Desync, match=f"rank 1 called one of {length} numbers"):
        ElasticSum(tmp_path, 0, lambda _: False).all_reduce([1.0], range(2))
