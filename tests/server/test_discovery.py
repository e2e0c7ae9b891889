"""Servers of workers that are on several hosts: TCP between hosts, memory inside of one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.runtime.secret import new_secret
from shoal.server.client import discovery
from shoal.strategy.strategy import parse
from shoal.sync.ps.worker import PsWorker
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.test_equal import SGD
from tests.test_equal import train as train_alone

WHERE = "aab"  # the host of each rank


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """`identity.host` is the host of a thread."""
    here = threading.local()
    monkeypatch.setattr(discovery, "host_id", lambda override: here.host.encode())
    monkeypatch.setenv("SHOAL_HOST", "127.0.0.1")
    monkeypatch.setenv("SHOAL_SECRET", new_secret().hex())
    monkeypatch.delenv("SHOAL_RUN_DIR", raising=False)
    return here


@pytest.mark.parametrize(
    ("strategy", "shared"),
    [
        ('ps(placement="workers")', ["mm-", "mm-", "--m"]),
        pytest.param('ps(placement="rank0")', ["m", "m", "-"], marks=pytest.mark.whole),
        pytest.param("ps(servers=2)", ["m-", "m-", "-m"], marks=pytest.mark.whole),
        pytest.param("ps(servers=2, replicas=2)", ["--", "--", "--"], marks=pytest.mark.whole),
        ('ps(placement="workers", update="worker")', ["mm-", "mm-", "--m"]),
    ],
)
def test_memory_inside_a_host_and_tcp_between_hosts(
    world: World, identity: threading.local, strategy: str, shared: list[str]
) -> None:
    data = samples(40)
    models = [mlp() for _ in WHERE]
    losses, _ = train_alone(solo_group(), "single", mlp(), data, 12)

    def body(group: Group) -> tuple[list[float], str]:
        identity.host = WHERE[group.rank]
        job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD, clip_norm=None)
        found = [float(step(b)) for b in job.batches(data, 12)]
        assert isinstance(step.sync, PsWorker)
        links = step.sync.client.links
        kinds = "".join("m" if link.shares_memory else "-" for link in links)
        assert all(link.route.is_unix == link.shares_memory for link in links)
        job.close()
        return found, kinds

    together = world(len(WHERE), body)
    assert [kinds for _, kinds in together] == shared
    for found, _ in together:
        assert found == pytest.approx(losses, abs=2e-5)
