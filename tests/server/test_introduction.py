"""Workers and the secret of a run: it is given, or read from a file; it never travels."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from shoal.comm import objects
from shoal.comm.call import Call
from shoal.comm.executors.scheduled.executor import Scheduled
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from shoal.server.client.discovery import Announcer, Introduction, introduce
from tests.conftest import World

WORKERS = 3
SECRET = new_secret()


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
    world: World, traffic: list[bytes]
) -> None:
    found = list(meet(world, [None] * WORKERS))
    (secret,) = {secret for _, secret in found}
    folder = found[0][0].secret_dir
    assert folder is not None
    assert [met.secret_dir for met, _ in found[1:]] == [None, None]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.secret.stat().st_mode) == 0o600
    folder.remove()
    assert_not_in(secret, traffic)


def test_several_hosts_without_a_secret_are_refused_with_the_variable_to_set(world: World) -> None:
    with pytest.raises(BadInput, match=r"several hosts.* set SHOAL_SECRET, or SHOAL_SECRET_FILE"):
        list(meet(world, [None] * WORKERS, "aab"))


def test_a_secret_that_one_host_lacks_is_named(world: World) -> None:
    with pytest.raises(BadInput, match="some workers have a secret and others have none"):
        list(meet(world, [SECRET, SECRET, None], "aab"))


def test_secrets_that_differ_are_noticed_before_anything_starts(world: World) -> None:
    with pytest.raises(ShoalError, match=r"SHOAL_SECRET differs between hosts"):
        list(meet(world, [SECRET, SECRET, new_secret()], "aab"))


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
