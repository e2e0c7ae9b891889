"""Sums over the ranks that survive, and groups that do not wait for ranks that are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.executors.deferred import Deferred
from shoal.comm.executors.solo import Solo
from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum, SurvivorSum
from shoal.errors import Desync, PeerLost


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


# ------------------------------------------------------------------ deferred groups


def on_remaining(
    folder: Path, size: int, body: Callable[[Group], Tensor], gone: set[int]
) -> list[Tensor]:
    def work(rank: int) -> Tensor:
        return body(Group(Deferred(folder, rank, size, lambda r: r in gone, Solo)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [r for r in range(size) if r not in gone], timeout=60))


def twice(group: Group) -> Tensor:
    first = torch.full((2, 3), float(group.rank)).t()
    group.broadcast(first).wait()
    second = torch.tensor([10 + group.rank], dtype=torch.int64)
    group.broadcast(second, root=2).wait()
    return torch.cat([first.reshape(-1), second])


@pytest.mark.parametrize(
    ("gone", "first", "second"),
    [(set(), 0, 12), ({0}, 1, 12), ({0, 1}, 2, 12), ({2}, 0, 10), ({0, 2}, 1, 11)],
)
def test_the_root_gives_or_else_the_first_that_is_left(
    tmp_path: Path, gone: set[int], first: int, second: int
) -> None:
    for found in on_remaining(tmp_path / "start", 4, twice, gone):
        assert found.tolist() == [first] * 6 + [second]
    assert not list(tmp_path.glob("start/*-given")), "files are gone when all have read them"


def test_what_was_given_counts_though_the_giver_is_gone(tmp_path: Path) -> None:
    gone: set[int] = set()
    groups = [Group(Deferred(tmp_path, r, 3, lambda r: r in gone, Solo)) for r in range(3)]
    found = [torch.tensor([float(r)]) for r in range(3)]
    groups[0].broadcast(found[0]).wait()
    gone.add(0)
    for rank in (2, 1):
        groups[rank].broadcast(found[rank]).wait()
    assert [float(t) for t in found] == [0.0, 0.0, 0.0]


def test_tensors_of_different_size_are_refused(tmp_path: Path) -> None:
    groups = [Group(Deferred(tmp_path, r, 2, lambda r: False, Solo)) for r in range(2)]
    groups[0].broadcast(torch.zeros(3)).wait()
    with pytest.raises(Desync, match=r"a broadcast of 8 bytes while rank 0 called .* 12 bytes"):
        groups[1].broadcast(torch.zeros(2)).wait()


def test_everything_else_is_done_by_a_whole_group_that_is_made_once(tmp_path: Path) -> None:
    made: list[Solo] = []

    def make() -> Solo:
        made.append(Solo())
        return made[-1]

    group = Group(Deferred(tmp_path, 0, 1, lambda r: False, make))
    out = torch.zeros(2)
    group.all_gather(out, torch.ones(2)).wait()
    group.barrier().wait()
    assert out.tolist() == [1.0, 1.0] and len(made) == 1
