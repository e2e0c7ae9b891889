"""The log: its entries reproduce the state, bit for bit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.server.consistency import Rule
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.messages import (
    Commit,
    LogEntry,
    ModelSpec,
    ParameterSlice,
    PushDecided,
    WorkerLeft,
)
from shoal.server.model import log as log_module
from shoal.server.model.membership import ModelFailure
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import RowPush
from shoal.server.model.snapshot import StateTensors, saved_state
from shoal.server.process.log_stream import Followers
from shoal.server.protocol import FrameKind, Refused, decode, encode
from shoal.server.protocol.connection import Connection
from tests.server.test_consistency import rules

SIZE = 12
TABLE = TableSpec("t", 10, 2, optimizer=RowOptimizer("adam", 0.1))
OPTIMIZERS = [
    NamedOptimizer("SGD", {"lr": 0.1, "momentum": 0.9}),
    NamedOptimizer("AdamW", {"lr": 0.01}),
]


def spec_of(rule: Rule, optimizer: NamedOptimizer | None, clip_norm: float | None) -> ModelSpec:
    """Two parameters, the first of them a matrix."""
    slices = (ParameterSlice(0, 0, 0, (2, 4)), ParameterSlice(1, 8, 0, (4,)))
    return ModelSpec(
        index=0,
        servers=1,
        leader="",
        rule=rule,
        dtype="float32",
        loss_flags_dtype="float32",
        size=SIZE,
        start=0,
        stop=SIZE,
        parameters=2,
        slices=slices,
        optimizer=optimizer,
        clip_norm=None if optimizer is None else clip_norm,
    )


def model_of(spec: ModelSpec, is_leader: bool) -> ServedModel:
    """All workers have joined; gradients travel over connections."""
    model = ServedModel(spec, is_leader)
    model.tables.make(TABLE)
    for worker in range(spec.rule.workers):
        model.join(worker, worker)
    return model


class Push(NamedTuple):
    """What one worker sends."""

    worker: int
    sequence: int
    commit: Commit
    gradients: Tensor
    loss_flags: Tensor
    rows: RowPush | None


def send(model: ServedModel, push: Push) -> str:
    """As the handlers do: gradients, rows, commit."""
    buffer = model.membership.members[push.worker].pushes
    buffer.expect(push.sequence)
    buffer.gradients[0].copy_(push.gradients)
    buffer.loss_flags[0].copy_(push.loss_flags)
    if push.rows is not None:
        model.tables.stage(buffer, push.sequence, push.rows)
    return model.commit(model.membership.members[push.worker], push.sequence, push.commit).verdict


# ---- random runs --------------------------------------------------------------------------------

specs = st.builds(
    spec_of, rules, st.sampled_from([*OPTIMIZERS, None]), st.sampled_from([None, 0.5])
)


def next_steps(model: ServedModel, worker: int) -> list[int]:
    """The steps that a worker may push now; none if it has to wait or has left."""
    ledger = model.state.ledger
    clock = ledger.clocks[worker]
    if worker not in ledger.live or not ledger.may_start(clock):
        return []
    if ledger.rule.asynchronous:
        return sorted({clock, max(clock, ledger.fastest)})
    if ledger.rule.quorum is not None:
        return list(range(clock, ledger.version + 1))
    return [clock]


def draw_push(data: st.DataObject, model: ServedModel, worker: int, step: int) -> Push:
    seed = data.draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    flags = data.draw(st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]))
    loss_flags = torch.tensor([0.5, *flags])
    rows = None
    if data.draw(st.booleans()):
        ids = torch.randint(0, TABLE.num_rows, (3,), generator=generator)
        rows = RowPush("t", ids, torch.randn(3, TABLE.dim, generator=generator), 0.1)
    lr = data.draw(st.sampled_from([None, 0.05, 0.2]))
    commit = Commit(step, model.version, 1 / model.spec.rule.workers, lr)
    sequence = model.membership.members[worker].pushes.committed + 1
    return Push(worker, sequence, commit, torch.randn(SIZE, generator=generator), loss_flags, rows)


def one_action(data: st.DataObject, model: ServedModel) -> Push | None:
    """A push that the rule allows, or a worker that leaves; the push is not sent yet."""
    choices = [
        (worker, step)
        for worker in range(model.spec.rule.workers)
        for step in next_steps(model, worker)
    ]
    leavers = sorted(model.state.ledger.live) if not model.spec.rule.is_synchronous else []
    if leavers and (not choices or data.draw(st.integers(0, 9)) == 0):
        model.membership.leave(data.draw(st.sampled_from(leavers)))
        return None
    if not choices:
        return None
    worker, step = data.draw(st.sampled_from(choices))
    return draw_push(data, model, worker, step)


def state_of(model: ServedModel) -> dict[str, Any]:
    """Everything that has to be equal, with tensors as bytes."""
    state, shard = model.state, model.state.shard
    document, copies = saved_state(model)
    saved = StateTensors.of(document, iter(copies))
    rows = [(w, p.table, raw(p.ids), raw(p.grads), p.lr) for w, p in state.tables.counted]
    is_open = bool(state.counted) and not model.spec.rule.is_synchronous
    return {
        "document": msgspec.structs.replace(document, tables=()),
        "weights": raw(saved.weights),
        "optimizer": [raw(t) for t in saved.optimizer],
        "pushes": (dict(state.decided), list(state.counted), state.fraction),
        "sum": (raw(shard.sum), raw(shard.loss_flags)) if is_open else None,
        "rows": rows,
        "tables": [(t.steps, rows_of(saved.tables[t.spec.name])) for t in document.tables],
    }


def rows_of(chunks: list[dict[str, Tensor]]) -> dict[int, dict[str, bytes]]:
    """By id: where a row is stored depends on the order of first use."""
    return {
        int(row): {key: raw(values[i]) for key, values in chunk.items()}
        for chunk in chunks
        for i, row in enumerate(chunk["ids"])
    }


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@given(specs, st.integers(1, 16), st.data())
def test_the_entries_of_a_log_reproduce_the_state(
    spec: ModelSpec, actions: int, data: st.DataObject
) -> None:
    """Pushes are staged on both models; the copy decides nothing, and gets entries as bytes."""
    leader = model_of(spec, is_leader=True)
    copy = model_of(spec, is_leader=False)
    for _ in range(actions):
        position = leader.log.position
        push = one_action(data, leader)
        if push is not None:
            assert send(copy, push) == "staged"
            send(leader, push)
        for entry in leader.log.entries_after(position):
            copy.replay(decode(encode(entry), LogEntry))
    assert state_of(copy) == state_of(leader)


# ---- positions -----------------------------------------------------------------------


def left(position: int) -> LogEntry:
    return LogEntry(position, WorkerLeft(0))


def test_an_entry_out_of_order_is_refused() -> None:
    model = model_of(spec_of(Rule(2, quorum=1), OPTIMIZERS[0], None), is_leader=False)
    for position in range(1, 6):
        model.replay(left(position))
    before = state_of(model)
    with pytest.raises(Refused, match="entry 7 is out of order: expected 6"):
        model.replay(left(7))
    with pytest.raises(Refused, match="entry 5 is out of order: expected 6"):
        model.replay(left(5))
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("push", "reason"),
    [
        (PushDecided(0, 1, 0, "admitted", 1.0, None), "push 1 of worker 0 is not staged here"),
        (PushDecided(1, 2, 0, "admitted", 1.0, None), "is out of order: expected 1"),
    ],
)
def test_a_decision_about_a_push_that_is_not_here_is_refused(
    push: PushDecided, reason: str
) -> None:
    model = model_of(spec_of(Rule(2, quorum=1), OPTIMIZERS[0], None), is_leader=False)
    before = state_of(model)
    with pytest.raises(Refused, match=reason):
        model.replay(LogEntry(1, push))
    assert state_of(model) == before


def test_a_log_keeps_the_latest_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_ENTRIES", 3)
    model = model_of(spec_of(Rule(2, quorum=1), OPTIMIZERS[0], None), is_leader=False)
    for position in range(1, 6):
        model.replay(left(position))
    assert [entry.position for entry in model.log.entries_after(2)] == [3, 4, 5]
    assert model.log.entries_after(5) == []
    with pytest.raises(Refused, match="entry 2 is not in the log, which has entries 3 to 5"):
        model.log.entries_after(1)
    with pytest.raises(Refused, match="entry 7 is not in the log"):
        model.log.entries_after(6)


def test_a_push_that_is_a_step_of_its_own_is_not_copied() -> None:
    model = model_of(spec_of(Rule(1, asynchronous=True), OPTIMIZERS[0], None), is_leader=True)
    send(model, Push(0, 1, Commit(0, 0, 1.0), torch.ones(SIZE), torch.ones(3), None))
    assert torch.equal(model.state.shard.data, torch.full((SIZE,), -0.1))
    assert not model.state.shard.sum.any()


# ---- followers -----------------------------------------------------------------------


def leader_of() -> tuple[ServedModel, Followers]:
    """The leader of two servers, with two workers and a quorum of one."""
    spec = spec_of(Rule(2, quorum=1), OPTIMIZERS[0], None)
    model = model_of(msgspec.structs.replace(spec, servers=2), is_leader=True)
    return model, Followers(model)


@contextmanager
def lost_follower() -> Iterator[ServedModel]:
    """A leader that has served a connection which has ended since."""
    model, followers = leader_of()
    ours, theirs = map(Connection, socket.socketpair())
    thread = threading.Thread(target=followers.serve, args=(1, 0, theirs))
    thread.start()
    assert ours.receive(100)[0].kind is FrameKind.OK
    ours.close()
    yield model
    followers.close()
    thread.join(60)
    theirs.close()


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


def test_a_follower_that_is_lost_fails_the_model_as_a_loss() -> None:
    push = Push(0, 1, Commit(0, 0, 0.5, 0.1), torch.ones(SIZE), torch.ones(3), None)
    with lost_follower() as model, pytest.raises(ModelFailure, match="server 1 was lost") as caught:
        send(model, push)
    assert caught.value.is_loss


def test_a_follower_that_has_finished_does_not_fail_the_workers_that_leave_last() -> None:
    with lost_follower() as model:
        model.membership.leave(0)
        model.membership.leave(1)
        assert model.membership.failure is None and model.membership.is_over
