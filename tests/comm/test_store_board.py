"""Ranks without a launcher of Shoal agree in torch's store on where to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from shoal.comm.members import store_board
from shoal.comm.members.store_board import StoreBoard
from shoal.runtime.preemption import Preemption

Ranks = tuple[list[Preemption], list[StoreBoard]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Preemptions and boards of two ranks on one store."""
    store = HashStore()
    preemptions = [Preemption(None, rank, 2) for rank in range(2)]
    with ExitStack() as stack:
        boards = [StoreBoard(store, rank, 2, preemptions[rank].ask) for rank in range(2)]
        for preemption, board in zip(preemptions, boards, strict=True):
            stack.enter_context(board)
            stack.enter_context(preemption.agreeing(board))
        yield preemptions, boards


def announce(boards: list[StoreBoard]) -> None:
    assert boards[1].announce()
    for board in boards:
        board._thread.join(30)  # it ends when all have heard


def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranks: Ranks) -> None:
    (first, other), boards = ranks
    assert not first.stops_after(3, True, 1)
    assert not other.stops_after(3, False, 1)
    announce(boards)
    assert not other.stops_after(8, False, 1)  # nothing is chosen yet
    assert not first.stops_after(7, True, 1)
    assert other.stops_after(8, False, 1)
    assert first.stops_after(8, True, 1)


def test_the_first_rank_does_not_choose_before_the_others_have_heard(ranks: Ranks) -> None:
    (first, _), boards = ranks
    boards[0]._has_heard = True
    first.ask()
    assert not first.stops_after(7, True, 1)
    assert not first.stops_after(8, True, 1)


def test_relaxed_ranks_stop_where_none_of_them_has_been(ranks: Ranks) -> None:
    (first, other), boards = ranks
    announce(boards)
    assert not first.stops_after(3, True, 4)
    assert not other.stops_after(9, False, 4)
    assert not first.stops_after(4, True, 4)
    assert not other.stops_after(11, False, 4)
    assert other.stops_after(12, False, 4)


def test_a_rank_whose_peers_are_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(store_board, "die", ended.set)
    monkeypatch.setattr(store_board, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(store_board, "_POLL_S", 0.01)
    with StoreBoard(HashStore(), 0, 2, lambda: None) as board:
        board.announce()
        assert ended.wait(30)
