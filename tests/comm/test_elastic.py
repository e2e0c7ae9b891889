from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.elastic import Sum, Tally
from shoal.errors import Desync, PeerLost


def together(
    size: int, body: Callable[[int], list[Sum]], ranks: list[int] | None = None
) -> list[list[Sum]]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, ranks if ranks is not None else range(size)))


def test_a_whole_group_adds_up_everything_each_time(tmp_path: Path) -> None:
    def body(rank: int) -> list[Sum]:
        tally = Tally(tmp_path, rank, lambda _: False)
        return [tally.add_up([rank, 0.5, call], range(3)) for call in (1, 2, 3)]

    expected = [Sum([3.0, 1.5, 3.0 * call], ()) for call in (1, 2, 3)]
    assert together(3, body) == [expected] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3-0.json", "3-1.json", "3-2.json"]


def test_numbers_arrive_to_the_last_bit(tmp_path: Path) -> None:
    numbers = [0.1, 1e-320, float("inf"), 2.0**53 + 2]
    assert Tally(tmp_path, 0, lambda _: False).add_up(numbers, [0]).numbers == numbers


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_survivors_find_the_same_whenever_others_are_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A rank writes in its first `written` rounds, is then noted as gone, and never comes back."""
    size = data.draw(st.integers(2, 4))
    lost = data.draw(st.dictionaries(st.integers(1, size - 1), st.integers(0, 3)))
    folder = tmp_path_factory.mktemp("tally")
    gone = {rank: threading.Event() for rank in range(size)}

    def body(rank: int) -> list[Sum]:
        tally = Tally(folder, rank, lambda other: gone[other].is_set())
        found: list[Sum] = []
        for _ in range(lost.get(rank, 3)):
            found.append(tally.add_up([2.0**rank], range(size)))
        if rank in lost:
            gone[rank].set()
        return found

    results = together(size, body)
    for i in range(3):
        there = [rank for rank in range(size) if lost.get(rank, 3) > i]
        missing = tuple(rank for rank in range(size) if rank not in there)
        expected = Sum([float(sum(2**rank for rank in there))], missing)
        assert [found[i] for rank, found in enumerate(results) if rank in there] == [
            expected
        ] * len(there)


def test_what_a_rank_wrote_before_it_was_lost_counts(tmp_path: Path) -> None:
    """It writes and is gone between two looks: the note is read first, so it is not overlooked."""
    looks = 0

    def is_gone(rank: int) -> bool:
        nonlocal looks
        looks += rank == 1
        if looks == 2:  # after the first look at the file, which was not there
            (tmp_path / "1-1.json").write_text("[5.0]")
        return looks >= 2

    assert Tally(tmp_path, 0, is_gone).add_up([1.0], [0, 1]) == Sum([6.0], ())


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    (tmp_path / "1-1.json").write_text("[5.0]")
    tally = Tally(tmp_path, 0, lambda _: False, patience_s=0.01)
    with pytest.raises(PeerLost, match=r"^rank 0 lost rank 2 after 0.01 s in .* ranks 2 and 3 ne"):
        tally.add_up([1.0], range(4))


@pytest.mark.parametrize("theirs", ["[1.0, 2.0]", '{"a": 1}', "[]"])
def test_ranks_that_add_up_other_things_are_told(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "1-1.json").write_text(theirs)
    length = len(json.loads(theirs)) if theirs.startswith("[") else 0
    with pytest.raises(Desync, match=f"rank 1 called one of {length} numbers"):
        Tally(tmp_path, 0, lambda _: False).add_up([1.0], range(2))
