"""The leader's log on its way to the followers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from shoal.protocol import FrameKind, Header, Refused, decode, encode
from shoal.protocol.connection import Connection
from shoal.server.consistency import Rule
from shoal.server.messages import (
    Commit,
    LogEntry,
    Norms,
    PushDecided,
    Scalar,
    StepApplied,
    WorkerLeft,
)
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.process.log_stream import Followers
from tests.server.test_log import OPTIMIZERS, SIZE, Push, model_of, send, spec_of


def leader_of(clip_norm: float | None = None) -> tuple[ServedModel, Followers]:
    """The leader of two servers, with two workers and a quorum of one."""
    spec = spec_of(Rule(2, quorum=1), OPTIMIZERS[0], clip_norm)
    model = model_of(msgspec.structs.replace(spec, servers=2), is_leader=True)
    return model, Followers(model)


@contextmanager
def follower_of(followers: Followers, position: int) -> Iterator[Connection]:
    """A connection that the leader serves in a thread; its first frame is the answer."""
    ours, theirs = map(Connection, socket.socketpair())
    thread = threading.Thread(target=followers.serve, args=(1, position, theirs))
    thread.start()
    try:
        assert ours.receive(100)[0].kind is FrameKind.OK
        yield ours
    finally:
        followers.close()
        thread.join(60)
        ours.close()
        theirs.close()


def next_entry(connection: Connection) -> LogEntry:
    header, meta = connection.receive(1000)
    assert header.kind is FrameKind.ENTRY
    return decode(meta, LogEntry)


def push_of_worker_0() -> Push:
    return Push(0, 1, Commit(0, 0, 0.5, 0.1), torch.ones(SIZE), torch.ones(3), None)


@pytest.mark.parametrize("has", [0, 1])
def test_a_follower_reads_the_entries_that_it_lacks_and_then_new_ones(has: int) -> None:
    model, followers = leader_of()
    model.membership.leave(1)
    with follower_of(followers, has) as connection:
        if has == 0:
            assert next_entry(connection) == LogEntry(1, 1, WorkerLeft(1))
        send(model, push_of_worker_0())
        decided = PushDecided(0, 1, 0, "admitted", 0.5, 0.1)
        assert next_entry(connection) == LogEntry(2, 1, decided)
        assert next_entry(connection) == LogEntry(3, 1, StepApplied(1, 0.1, 0.5, None))


@pytest.mark.parametrize(
    ("index", "position", "reason"),
    [
        (0, 0, "server 0 is not expected here"),
        (2, 0, "server 2 is not expected here"),
        (1, 7, "entry 8 is not in the log, which has entries 1 to 0"),
    ],
)
def test_a_follower_that_cannot_be_served_is_refused(
    index: int, position: int, reason: str
) -> None:
    _, followers = leader_of()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Refused, match=reason):
        followers.serve(index, position, Connection(theirs))


def test_a_push_waits_until_all_followers_have_connected() -> None:
    model, followers = leader_of()
    pushing = threading.Thread(target=send, args=(model, push_of_worker_0()))
    pushing.start()
    with follower_of(followers, 0) as connection:
        assert next_entry(connection).position == 1
        assert next_entry(connection).position == 2
        pushing.join(60)
        assert model.version == 1


def test_the_clip_factor_of_an_entry_is_that_of_all_servers() -> None:
    """Here 12 ones, divided by 0.5; on the follower norms of 6 and 8."""
    model, followers = leader_of(clip_norm=1.0)
    pushing = threading.Thread(target=send, args=(model, push_of_worker_0()))
    with follower_of(followers, 0) as connection:
        pushing.start()
        assert next_entry(connection).position == 1
        header, meta = connection.receive(1000)
        assert header.kind is FrameKind.NORMS
        assert decode(meta, Scalar).value == 0.5
        connection.send(Header(FrameKind.NORMS), encode(Norms((6.0, 8.0))))
        applied = next_entry(connection).decision
        pushing.join(60)
    assert isinstance(applied, StepApplied)
    assert applied.clip_factor == pytest.approx(1 / (4 * 12 + 100) ** 0.5)


def test_a_follower_that_is_lost_fails_the_model_as_a_loss() -> None:
    model, followers = leader_of()
    with follower_of(followers, 0) as connection:
        connection.close()
        with pytest.raises(ModelFailure, match="server 1 was lost") as caught:
            send(model, push_of_worker_0())
    assert caught.value.is_loss


def test_a_follower_that_has_finished_does_not_fail_the_workers_that_leave_last() -> None:
    model, followers = leader_of()
    with follower_of(followers, 0) as connection:
        connection.close()
        model.membership.leave(0)
        model.membership.leave(1)
        assert model.membership.failure is None and model.membership.is_over
