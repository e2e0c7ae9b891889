"""A group that does not wait for ranks that are gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.comm.executors.deferred import Deferred
from shoal.comm.executors.solo import Solo
from shoal.comm.group import Group
from shoal.errors import Desync


def on_ranks(
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
    for found in on_ranks(tmp_path / "start", 4, twice, gone):
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
