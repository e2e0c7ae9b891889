"""Workers and the secret of a run: it is given, or read from a file; it never travels."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm import objects
from shoal.comm.call import Call
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from shoal.server.client import discovery
from shoal.server.client.discovery import Announcer, Introduction, introduce
from shoal.strategy.strategy import parse
from shoal.sync.ps.worker import PsWorker
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.test_equal import SGD
from tests.test_equal import train as train_alone

WORKERS = 3
SECRET = new_secret()


@pytest.fixture(autouse=True)
def no_key_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that ranks hand to a collective."""
    seen: list[bytes] = []
    submit = Scheduled.submit

    def recorded(self: Scheduled, call: Call) -> object:
        if isinstance(call.data, Tensor):
            seen.append(call.data.numpy().tobytes())
        return submit(self, call)

    monkeypatch.setattr(Scheduled, "submit", recorded)
    return seen


def meet(
    world: World, secrets: list[bytes | None], hosts: str = "aaa"
) -> Iterator[tuple[Introduction, bytes]]:
    """What each worker knows, and the secret that it has."""

    def body(group: Group) -> tuple[Introduction, bytes]:
        config = RunConfig(secret=secrets[group.rank], host_id=hosts[group.rank])
        met = introduce(group, ReplicaGroup(), config)
        met.announcer.broadcast(group, "a word", b"hello")
        return met, met.announcer.secret

    yield from world(len(secrets), body)


def assert_not_in(secret: bytes, traffic: list[bytes]) -> None:
    everything = b"".join(traffic)
    assert len(everything) > 100
    for form in (secret, secret.hex().encode(), secret[:8], secret.hex()[:16].encode()):
        assert form not in everything


def test_a_given_secret_does_not_travel(world: World, traffic: list[bytes]) -> None:
    for _, secret in meet(world, [SECRET] * WORKERS, "aab"):
        assert secret == SECRET
    assert_not_in(SECRET, traffic)


def test_workers_of_one_host_read_the_secret_from_a_private_file(
    world: World, traffic: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (secret,) = {secret for _, secret in meet(world, [None] * WORKERS)}
    (file,) = tmp_path.rglob("key")
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for each in (secret, bytes.fromhex(file.read_text())):
        assert_not_in(each, traffic)
    assert {secret for _, secret in meet(world, [None] * WORKERS)} != {secret}  # of each start


@pytest.mark.parametrize(
    ("secrets", "reason"),
    [
        ([None] * 3, r"several hosts.* set SHOAL_SECRET, or SHOAL_SECRET_FILE"),
        ([SECRET, SECRET, None], "some workers have a secret and others have none"),
        ([SECRET, SECRET, new_secret()], "SHOAL_SECRET differs between hosts"),
    ],
)
def test_hosts_that_do_not_share_a_secret_are_refused_before_anything_starts(
    world: World, secrets: list[bytes | None], reason: str
) -> None:
    with pytest.raises(ShoalError, match=reason):
        list(meet(world, secrets, "aab"))


@pytest.mark.parametrize("changed", ["data", "code", "garbage"])
def test_an_announcement_by_a_stranger_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    broadcast = objects.broadcast_bytes

    def forged(group: Group, data: bytes, root: int, max_bytes: int) -> bytes:
        told = broadcast(group, data, root, max_bytes)
        code, _, word = told.partition(b"\n")
        if group.rank == 0:
            return told
        forgeries = {
            "data": code + b"\nhell",
            "code": b"00" * 32 + b"\n" + word,
            "garbage": b"\xff",
        }
        return forgeries[changed]

    monkeypatch.setattr(objects, "broadcast_bytes", forged)
    with pytest.raises(ShoalError, match="without the secret of this run"):
        list(meet(world, [SECRET] * 2, "ab"))


def test_an_announcement_of_another_run_is_refused(world: World) -> None:
    """The nonces of the ranks are part of the proof."""
    met = [[m for m, _ in meet(world, [SECRET] * 2, "ab")] for _ in range(2)]

    def body(group: Group) -> bytes:
        announcer: Announcer = met[group.rank][group.rank].announcer  # rank 1: of the other run
        return announcer.broadcast(group, "a word", b"hello")

    with pytest.raises(ShoalError, match="without the secret of this run"):
        world(2, body)


def test_the_secret_comes_from_a_file_that_only_this_user_can_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    config = RunConfig(secret_file=file)
    with pytest.raises(BadInput, match="No such file"):
        config.read_secret()
    file.write_text(SECRET.hex() + "\n")
    file.chmod(0o640)
    with pytest.raises(BadInput, match="chmod 600"):
        config.read_secret()
    file.chmod(0o600)
    assert config.read_secret() == SECRET
    file.write_bytes(b"\xff\xfe" * 40)
    with pytest.raises(BadInput, match="32 hexadecimal digits"):
        config.read_secret()


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
