"""The board of workers on several hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from shoal.comm.members.board import GroupMember
from shoal.comm.members.network_board import LOG, NetworkBoard, ServedBoard, entry_bytes
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import AT_THE_END, StoreRequest
from shoal.errors import BadInput, PeerLost

SECRET = b"k" * 32


@pytest.fixture
def service() -> Iterator[StoreService]:
    with closing(StoreService("127.0.0.1", 0, SECRET)) as service:
        yield service


@contextmanager
def opened(
    service: StoreService, worker: int, run: int = 1
) -> Iterator[tuple[NetworkBoard, list[Any]]]:
    taken: list[Any] = []
    address = ("127.0.0.1", service.port)
    with closing(NetworkBoard(address, SECRET, GroupMember(worker, 0), run)) as board:
        board.take = taken.append
        yield board, taken


def wait_for(board: NetworkBoard, taken: list[Any], count: int) -> None:
    while len(taken) < count:
        board.look()
        threading.Event().wait(0.001)


def test_who_appends_has_seen_all_documents_before_its_own(service: StoreService) -> None:
    def count(worker: int) -> list[Any]:
        with opened(service, worker) as (board, taken):
            for _ in range(20):
                board.append(lambda: {"number": len(taken), "by": worker})
            wait_for(board, taken, 60)
            return taken

    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda w=w: found.append(count(w))) for w in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [document["number"] for document in found[0]] == list(range(60))
    assert found[0] == found[1] == found[2]


def test_documents_of_another_call_of_the_script_are_not_handed_over(
    service: StoreService,
) -> None:
    with opened(service, 0, run=1) as (first, _), opened(service, 1, run=2) as (second, taken):
        first.append(lambda: {"run": 1})
        second.append(lambda: {"run": 2})
    assert taken == [{"run": 2}]


def test_what_a_process_appends_after_its_exit_does_not_count(service: StoreService) -> None:
    launcher = ServedBoard(service)
    me = GroupMember(1, 0)
    late = entry_bytes({"by": me, "run": 1, "document": {"after": 1}})
    with opened(service, 0) as (board, taken), opened(service, 1) as (lost, _):
        lost.append(lambda: {"before": 1})
        launcher.note_exit(me)
        service.post(StoreRequest("append", [LOG], late, number=AT_THE_END))
        launcher.note_start(GroupMember(1, 1))
        while not board.has_exited(me) or board.is_absent(1):
            board.look()
        board.append(lambda: {"end": 1})
        assert taken == [{"before": 1}, {"end": 1}]
        assert not board.has_exited(GroupMember(1, 1))
        with pytest.raises(PeerLost, match="reaching the launcher"):
            lost.append(lambda: {"after": 2})


def test_a_board_that_breaks_is_the_loss_of_this_worker(service: StoreService) -> None:
    lost: list[GroupMember] = []
    with opened(service, 2) as (board, _):
        board.watch(lost.append)
        service.close()
        with pytest.raises(PeerLost, match="rank 2 lost a peer after 3 s in reaching the launcher"):
            board.append(lambda: {})
        while not lost:
            threading.Event().wait(0.001)
    assert lost == [GroupMember(2, 0)]


def test_a_process_without_the_key_cannot_use_it(service: StoreService) -> None:
    with pytest.raises(BadInput, match="another key"):
        NetworkBoard(("127.0.0.1", service.port), b"x" * 32, GroupMember(0, 0), 1)
