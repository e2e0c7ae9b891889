"""Sums over the ranks that survive."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.members.elastic_sum import ElasticSum, SurvivorSum
from shoal.errors import PeerLost


def test_a_sum_beside_another_counts_its_own_calls_and_bits_stay(tmp_path: Path) -> None:
    numbers = [0.1, 1e-320, float("inf"), 2.0**53 + 2]

    def body(rank: int) -> None:
        one = ElasticSum(tmp_path / "sums", rank, lambda _: False)
        other = one.beside("other")
        for call in (1.0, 2.0):
            assert one.all_reduce([rank, call], range(3)) == SurvivorSum([3.0, 3.0 * call], ())
        assert other.gather(numbers, range(3)) == dict.fromkeys(range(3), numbers)
        one.begin("a meeting")
        assert one.gather(["ä\n"], range(3)) == {rank: ["ä\n"] for rank in range(3)}

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(body, range(3)))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_survivors_find_the_same_whenever_others_are_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A rank writes in its first `written` rounds, is then recorded as exited, and stays away."""
    size = data.draw(st.integers(2, 4))
    lost = data.draw(st.dictionaries(st.integers(1, size - 1), st.integers(0, 3)))
    file = tmp_path_factory.mktemp("elastic") / "sums"
    exited = {rank: threading.Event() for rank in range(size)}

    def body(rank: int) -> None:
        elastic = ElasticSum(file, rank, lambda other: exited[other].is_set())
        for i in range(lost.get(rank, 3)):
            there = [peer for peer in range(size) if lost.get(peer, 3) > i]
            missing = tuple(peer for peer in range(size) if peer not in there)
            found = elastic.all_reduce([2.0**rank], range(size))
            assert found == SurvivorSum([float(sum(2**peer for peer in there))], missing)
        if rank in lost:
            exited[rank].set()

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(body, range(size)))


def test_what_a_rank_wrote_before_it_was_lost_counts(tmp_path: Path) -> None:
    """It writes and exits between two looks: the exit is read first, so nothing is missed."""
    looks = 0

    def has_exited(rank: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:  # after the first look at the file, where nothing was
            lost = ElasticSum(tmp_path / "sums", rank, lambda _: True)
            lost.gather([5.0], [rank])
        return looks >= 2

    elastic = ElasticSum(tmp_path / "sums", 0, has_exited)
    assert elastic.all_reduce([1.0], [0, 1]) == SurvivorSum([6.0], ())


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    elastic = ElasticSum(tmp_path / "sums", 0, lambda _: False, patience_s=0.01)
    with pytest.raises(PeerLost, match=r"^rank 0 lost rank 2 after 0.01 s in .* 2 and 3 never"):
        elastic.all_reduce([1.0], [0, 2, 3])
