"""One member of a chain: while it applies an operation, asks the others, keeps its lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import Fetch
from shoal.server.chain.messages import Acked, Append, Ask, At, Confirm
from shoal.server.coordinator import Answer, KeepAlive, List, Request
from shoal.server.member.operations import Left, Proposed
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import ChainPlace
from shoal.server.member.runtime import ChainRuntime
from shoal.server.member.start import ChainSettings
from shoal.server.process.model_host import ModelHost
from shoal.server.process.server import Server
from tests.server.coordinator.helpers import LocalCoordinator
from tests.server.helpers import SECRET
from tests.server.replicas.world import TTL_S, SharedCoordinator

LIMIT_S = 30.0


class Recorder:
    """A link to another replica that sends nothing."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, message: object) -> None:
        if isinstance(message, Append | Acked):
            self.posted.append(message)


class SlowApply:
    """The first operation is applied when `go_on` is set."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.workers: list[int] = []

    def __call__(self, operation: Left) -> int:
        if not self.workers:
            self.began.set()
            assert self.go_on.wait(LIMIT_S)
        self.workers.append(operation.worker)
        return operation.worker


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowApply:
    found = SlowApply()
    monkeypatch.setattr(Left, "apply", lambda left, host, payload: found(left))
    return found


def replica(me: int, replicas: int) -> tuple[ChainRuntime, dict[int, Recorder]]:
    """One of a chain of replicas 0, 1, …; its successor has nothing yet."""
    place = ChainPlace(0, me, replicas)
    runtime = ChainRuntime(place, ModelHost(SECRET, 1 << 20, dict), lambda: None)
    peers = {peer: Recorder() for peer in range(replicas) if peer != me}
    runtime.links = cast(dict[int, PeerLink], peers)
    members = tuple(range(replicas))
    incarnations = tuple(runtime.node.incarnation if m == me else 7 for m in members)
    config = ChainConfig(1, members, incarnations)
    runtime.reconfigure(lambda manager: manager.fetched(Fetch(1), config, 1, {}))
    if me + 1 in peers:
        runtime.deliver(me + 1, At(1, 0, 0))
    return runtime, peers


@contextmanager
def running(do: Any, *arguments: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=do, args=arguments)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_head_passes_operations_on_while_it_applies_another_one(slow: SlowApply) -> None:
    runtime, peers = replica(0, 2)
    answers: list[int] = []

    def execute(worker: int) -> None:
        runtime.execute(Left(0, worker), on_committed=answers.append)

    with running(execute, 5):
        assert slow.began.wait(LIMIT_S)
        with running(execute, 6):
            with runtime.changed:
                assert runtime.changed.wait_for(lambda: runtime.node.position == 2, LIMIT_S)
            assert [message.position for message in peers[1].posted] == [1, 2]
            runtime.deliver(1, Acked(1, 2))
            assert not answers, "what is not applied here has no answer"
            slow.go_on.set()
    assert slow.workers == [5, 6]
    assert answers == [5, 6]


def test_an_operation_is_acknowledged_while_it_is_applied(slow: SlowApply) -> None:
    runtime, peers = replica(1, 3)
    with running(runtime.deliver, 0, Append(1, 1, 0, Proposed(Left(0, 5)))):
        assert slow.began.wait(LIMIT_S)
        assert [message.position for message in peers[2].posted] == [1]
        runtime.deliver(2, Acked(1, 1))
        assert runtime.node.committed == 1
        assert peers[0].posted == [Acked(1, 1)]
        slow.go_on.set()


def test_a_read_waits_for_what_is_logged(slow: SlowApply) -> None:
    runtime, _ = replica(1, 2)
    seen: list[list[int]] = []

    def read() -> None:
        runtime.catch_up()
        seen.append(list(slow.workers))

    with running(runtime.deliver, 0, Append(1, 1, 0, Proposed(Left(0, 5)))):
        assert slow.began.wait(LIMIT_S)
        with running(read):
            slow.go_on.set()
    assert seen == [[5]]


class _ForgetfulPeer:
    """A link to a member whose first answer is lost; `changed` is notified all the time."""

    def __init__(self, runtime: ChainRuntime):
        self.runtime = runtime
        self.asks = 0

    def post(self, message: object) -> None:
        if isinstance(message, Ask):
            self.asks += 1
            if self.asks > 1:
                answer = Confirm(message.epoch, message.number)
                threading.Thread(target=self.runtime.deliver, args=(1, answer)).start()


def test_a_question_whose_answer_was_lost_is_repeated_while_others_are_busy() -> None:
    """The keeper looks at the coordinator, and other workers push, many times a second."""
    runtime, _ = replica(0, 2)
    peer = _ForgetfulPeer(runtime)
    runtime.links = {1: cast(PeerLink, peer)}
    is_over = threading.Event()

    def keep_busy() -> None:
        while not is_over.wait(0.01):
            runtime.reconfigure(lambda manager: [])

    with running(keep_busy):
        runtime.confirm(runtime.node)
        is_over.set()
    assert peer.asks == 2


RENEWALS = 8  # more than the time of a lease


class SlowReads(SharedCoordinator):
    """The same coordinator over a connection on which lists wait; it counts renewals."""

    def __init__(self, shared: LocalCoordinator):
        self._core = shared._core
        self.asked = threading.Event()
        self.goes_on = threading.Event()
        self.renewals = threading.Semaphore(0)

    def _ask(self, request: Request) -> Answer:
        if isinstance(request, List):
            self.asked.set()
            assert self.goes_on.wait(60)
        answer = super()._ask(request)
        if isinstance(request, KeepAlive):
            self.renewals.release()
        return answer

    def close(self) -> None:
        self.goes_on.set()


def test_a_read_that_takes_long_does_not_cost_the_lease(tmp_path: Path) -> None:
    shared = SharedCoordinator()
    reads, leases = SlowReads(shared), SlowReads(shared)
    leases.goes_on.set()
    address = f"unix:{tmp_path}/server.sock"
    settings = ChainSettings(ChainPlace(0, 0, 2), reads, TTL_S, leases=leases)
    with Server(address, SECRET, chain=settings):
        assert reads.asked.wait(60)
        before = shared.live("alive/")
        for _ in range(RENEWALS):
            assert leases.renewals.acquire(timeout=60)
        assert before and shared.live("alive/") == before
        reads.goes_on.set()
