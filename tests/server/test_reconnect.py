"""Connections that break are opened again, and every push still counts once."""

from __future__ import annotations

import socket
import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.runtime.config import WaitConfig
from shoal.runtime.waits import Watcher
from shoal.server.client.link import ServerLink
from shoal.server.consistency import Rule
from shoal.server.protocol.connection import Closed
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.server.cutting import proxied
from tests.server.helpers import MODEL, SECRET, client_of, fill, servers
from tests.sync.test_ps_rows import OPTIMIZERS, Clicks
from tests.sync.test_ps_rows import go as train_rows

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
clicks = partial(Clicks, OPTIMIZERS["adam"])


def trained(group: Group, strategy: str, model: nn.Module) -> tuple[list[float], Tensor]:
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    step = job.step(model, F.cross_entropy, optimizer=ADAMW, clip_norm=0.5)
    losses = [float(step(b)) for b in job.batches(samples(60), 12, epochs=2)]
    with step.sync.full_weights():
        weights = step.flat.data.detach().clone()
    job.close()
    if group.rank == 0:
        updates = job.report()["sync"][0]["servers"][0]["updates"]
        assert updates == 10, "5 batches, twice, however often they were pushed"
    return losses, weights


def trained_rows(group: Group, strategy: str, model: nn.Module) -> tuple[list[float], Tensor]:
    losses, rows, weight = train_rows(group, "ps", model)
    return losses, torch.cat([rows.flatten(), weight.flatten()])


@pytest.mark.product
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("ps", 2),
        ('ps(update="worker")', 2),
        ('ps(mode="async")', 1),
        ("ps(quorum=1)", 2),
        ("rows", 2),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_result_is_the_same_to_the_bit_when_connections_break(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str, size: int, seed: int
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET.hex())
    train, make = (trained, mlp) if strategy != "rows" else (trained_rows, clicks)
    found = []
    for cuts in (0, 25):
        with servers(1, tcp=True) as (server,), proxied([server.address], seed, cuts) as (proxy,):
            monkeypatch.setenv("SHOAL_SERVERS", proxy.address)
            models = [make() for _ in range(size)]
            found.append(world(size, lambda g, m=models: train(g, strategy, m[g.rank])))  # type: ignore[misc]
            assert proxy.cut == cuts, "each of them broke something"
            assert set(server.refused) <= {"silent or broken before HELLO"}
    for (losses, weights), (same_losses, same_weights) in zip(*found, strict=True):
        assert losses == same_losses
        assert torch.equal(weights, same_weights)


def test_a_server_that_has_ended_is_reported_once_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.client.route.RECONNECT_S", 0.2)
    with servers(2, tcp=True) as found:
        client = client_of(found, 0, Rule(1))
        found[1].close()
        with pytest.raises(
            PeerLost, match=r"COMMIT to server 1 \(.*\); reconnecting failed \(.*refused"
        ):
            client.commit(*fill(client, 1.0))
        with pytest.raises(PeerLost, match="COMMIT to server 1"):
            client.commit(*fill(client, 1.0))


def test_a_worker_that_does_not_come_back_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.server.process.peer.RECONNECT_S", 0.2)
    with servers(1, tcp=True) as found:
        client = client_of(found, 0, Rule(2))
        other = client_of(found, 1, Rule(2))
        other.close()
        with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
            client.barrier()


def test_a_connection_that_only_the_worker_saw_break_is_displaced() -> None:
    """The server waits for another worker in the old one when the new one asks the same."""
    with servers(1, tcp=True) as found:
        client = client_of(found, 0, Rule(2))
        other = client_of(found, 1, Rule(2))
        asked = client.pull(1, 1)
        deaf = client.links[0].connection("pull").sock
        deaf.shutdown(socket.SHUT_RD)
        for worker in (client, other):
            worker.commit(*fill(worker, 1.0))
        assert asked.wait().version == 1


@pytest.mark.parametrize("_", range(4))
def test_of_connections_that_wait_to_follow_a_broken_one_the_last_is_served(_: int) -> None:
    with servers(1, tcp=True) as found:
        client = client_of(found, 0, Rule(1))
        route = client.links[0].route
        model = found[0].models[MODEL]
        asked = threading.Semaphore(0)
        member = model.membership.members[0]
        with model.lock:
            assert model.lock.wait_for(lambda: "push" in member.channels, 60)
            slow = member.channels["push"]._replace(abort=asked.release)
            member.channels["push"] = slow
        first = route.connect("push", 60)
        assert asked.acquire(timeout=60)  # the server counts it before the next one
        second = route.connect("push", 60)
        assert asked.acquire(timeout=60)
        with model.lock:
            del member.channels["push"]
            model.lock.notify_all()
        with pytest.raises(Closed):
            first.receive(100)
        route.put("push", second)
        assert client.commit(*fill(client, 1.0)).verdict == "admitted"
        assert not found[0].refused
        first.close()
        client.leave()


LIMITED = WaitConfig(notice_s=1e6, limit_s=0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker waits for its server longer than any test runs: the server is what gives up."""
    monkeypatch.setattr("shoal.server.client.link.PATIENCE", 1e6)


@pytest.mark.parametrize("waits_in", ["PULL", "BARRIER"])
def test_a_wait_that_misses_a_worker_names_it(patient: None, waits_in: str) -> None:
    with servers(1) as found, Watcher(LIMITED):
        client = client_of(found, 0, Rule(2))
        client_of(found, 1, Rule(2))
        client.commit(*fill(client, 1.0))
        with pytest.raises(PeerLost, match=f"rank 0 lost rank 1 in {waits_in} to server 0"):
            client.barrier() if waits_in == "BARRIER" else client.pull(1, 1).wait()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_server_that_does_not_answer_is_named(tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoal.server.client.link.PATIENCE", 0.5
    )  # the server keeps its silence longer
    with servers(1, tcp=tcp) as found:
        client = client_of(found, 0, Rule(2))
        client_of(found, 1, Rule(2))
        link: ServerLink = client.links[0]
        with (
            Watcher(LIMITED),
            found[0].models[7].lock,  # its threads are all held up
            pytest.raises(PeerLost, match=r"after .* s in PULL to server 0 \(no answer\)"),
        ):
            client.pull(1, 1).wait()
        with pytest.raises(PeerLost, match="PULL to server 0"):
            client.pull(1, 1).wait()
        assert link.rank == 0
