"""The launcher's coordinator: there while the block runs, started again when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from shoal.coordinator import Alive, Coordinator
from shoal.coordinator.client import open_coordinator
from shoal.errors import BadInput
from shoal.launch.here.coordinator import MAX_RESTARTS, RunCoordinator, coordinated
from shoal.launch.here.process_config import Replication
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from tests.coordinator.etcd_cluster import NEEDS_ETCD, etcd_cluster
from tests.coordinator.helpers import run_dir, until


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@contextmanager
def embedded(said: Said, *failpoints: str) -> Iterator[tuple[RunCoordinator, Coordinator, RunDir]]:
    with run_dir() as folder:
        config = replace(RunConfig.from_environment({**os.environ}), failpoints=failpoints)
        with coordinated(Replication(2), 2, config, folder, said) as coordinator:
            coordinator.watch()
            client = open_coordinator(replace(coordinator.config, run_dir=folder), "a test", 20.0)
            try:
                yield coordinator, client, folder
            finally:
                client.close()


def test_it_starts_without_torch() -> None:
    hidden = "import sys; sys.modules['torch'] = None\n"
    program = "import shoal.coordinator.main, shoal.coordinator.client"
    subprocess.run([sys.executable, "-c", hidden + program], check=True)


def test_it_is_started_again_from_its_log_and_ends_with_the_block() -> None:
    said = Said()
    with embedded(said) as (coordinator, client, _):
        written = client.put_if("chain/0", b"1", 0)
        first = coordinator.pid
        os.kill(first, signal.SIGKILL)
        assert client.get("chain/0") == written
        assert client.put_if("chain/0", b"2", written.version).version > written.version
        second = coordinator.pid
    assert second != first
    assert said == ["the coordinator was killed (SIGKILL): started again (1 of 5)"]
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_coordinator_of_the_user_is_used_as_it_is() -> None:
    with run_dir() as folder:
        config = replace(RunConfig(), coordinator="tcp:127.0.0.1:4000")
        with coordinated(Replication(2), 2, config, folder, Said()) as coordinator:
            coordinator.watch()
            assert coordinator.config == config


def test_an_etcd_beyond_this_host_needs_tls_or_a_trusted_network() -> None:
    with run_dir() as folder:
        config = replace(RunConfig(), coordinator="etcd://10.0.0.1:2379")
        with (
            pytest.raises(BadInput, match=r"etcd at 10\.0\.0\.1:2379 in the clear: use etcds"),
            coordinated(Replication(2), 2, config, folder, Said()),
        ):
            pass


@pytest.mark.whole
def test_an_etcd_that_does_not_answer_is_bad_input() -> None:
    with run_dir() as folder:
        config = replace(RunConfig(), coordinator="etcd://127.0.0.1:1")
        with (
            pytest.raises(BadInput, match=r"the launcher: etcd at 127\.0\.0\.1:1 has not answered"),
            coordinated(Replication(2), 2, config, folder, Said()),
        ):
            pass


@pytest.mark.whole
@NEEDS_ETCD
def test_no_key_of_the_run_is_left_in_etcd() -> None:
    with run_dir() as folder, etcd_cluster() as cluster:
        config = replace(RunConfig(), coordinator=f"etcd://{cluster.hosts}")
        with coordinated(Replication(2), 2, config, folder, Said()) as coordinator:
            client = open_coordinator(replace(coordinator.config, run_dir=folder))
            client.put_if("chain/0", b"1", 0)
        assert client.list("").entries == {}
        client.close()


@pytest.mark.whole
def test_a_server_that_has_exited_is_forgotten_before_its_lease_ends() -> None:
    with embedded(Said()) as (coordinator, client, _):
        lease = client.grant(60.0, "server 1")
        value = msgspec.msgpack.encode(Alive(1, "", 77))
        written = client.put_if("alive/1", value, 0, lease.id)
        coordinator.server_exited(1, 77)
        assert client.watch("alive/1", written.version, 20.0).changes[0].value is None
        os.kill(coordinator.pid, signal.SIGSTOP)
        coordinator.server_exited(1, 77)  # its thread ends with the block


@pytest.mark.whole
def test_it_is_started_again_a_few_times_only() -> None:
    said = Said()
    with embedded(said) as (coordinator, client, _):
        for number in range(MAX_RESTARTS + 1):
            client.get("a")
            os.kill(coordinator.pid, signal.SIGKILL)
            until(lambda count=number: len(said) > count, "a line about it")  # type: ignore[misc]
    assert said[-1].endswith("no server that is lost can be replaced now")
    assert len(said) == MAX_RESTARTS + 1


@pytest.mark.whole
def test_what_it_writes_is_said_before_it_is_given_up() -> None:
    said = Said()
    with embedded(said) as (coordinator, client, folder):
        client.put_if("a", bytes(1000), 0)
        data = bytearray(folder.coordinator_log.read_bytes())
        data[40] ^= 1  # of the image at its begin
        folder.coordinator_log.write_bytes(data)
        os.kill(coordinator.pid, signal.SIGKILL)
        until(lambda: bool(said) and "no server that is lost" in said[-1], "the last line")
    assert "damaged" in said[1] and said[1].startswith("coordinator: shoal: the coordinator's log")


@pytest.mark.whole
def test_a_stopped_coordinator_ends_with_the_block() -> None:
    with embedded(Said()) as (coordinator, client, _):
        client.get("a")
        os.kill(coordinator.pid, signal.SIGSTOP)
        client.close()
    assert not [t for t in threading.enumerate() if t.name == "shoal-coordinator"]
