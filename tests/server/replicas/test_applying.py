"""What goes on in a replica while it applies an operation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import Fetch
from shoal.server.chain.messages import Acked, Append, At
from shoal.server.member.operations import Left, Proposed
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import ChainPlace
from shoal.server.member.runtime import ChainRuntime
from shoal.server.process.model_host import ModelHost
from tests.server.helpers import SECRET

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
