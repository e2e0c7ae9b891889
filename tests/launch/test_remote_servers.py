"""Servers on hosts that an engine lends: where they are placed, and what follows from a loss."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.errors import BadInput
from shoal.launch.here.local import LaunchSpec
from shoal.launch.here.output import LogFiles, OutputSink
from shoal.launch.here.process_config import Replication, replication_of
from shoal.launch.here.processes import ProcessExit
from shoal.launch.here.supervisor import Event
from shoal.launch.hosts.agent_messages import ServerListens, ServerTask
from shoal.launch.hosts.machines import HostProgram, Machine, servers_in_turn
from shoal.launch.hosts.remote import run_attempts
from shoal.launch.hosts.remote_servers import RemoteRun, RemoteServers
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.variable_text import LaunchedServer
from shoal.strategy.strategy import as_strategy
from tests import scripts
from tests.launch.helpers import Screen
from tests.launch.hosts_here import HostsHere

TWO_COPIES = Replication(replicas=2)
HOSTS = [Machine(name, f"10.0.0.{n}", 1) for n, name in enumerate("abc", 1)]


def test_hosts_take_servers_in_turn_and_the_first_has_the_coordinator() -> None:
    hosts = servers_in_turn(HOSTS[:2], 4, TWO_COPIES)
    assert [host.name for host in hosts.servers] == ["a", "b", "b", "a"]
    assert hosts.coordinator == HOSTS[0]
    assert servers_in_turn(HOSTS, 2, Replication()).coordinator is None


def test_a_server_is_named_by_one_address_or_two() -> None:
    for server in (LaunchedServer("tcp:a:1"), LaunchedServer("tcp:a:1", "unix:/s", "h0")):
        assert LaunchedServer.decode(server.encode()) == server
    with pytest.raises(BadInput, match=r"use ADDRESS or ADDRESS\|SOCKET\|HOST"):
        LaunchedServer.decode("tcp:a:1|unix:/s")


class SaidServer(queue.SimpleQueue[int]):
    """A server that says where it listens, and is there until it is killed."""

    def wait(self) -> int:
        return self.get()

    def send_signal(self, number: signal.Signals) -> None:
        self.put(-number if number == signal.SIGKILL else 0)


class MovingHosts(HostsHere):
    """The next host takes what one has lost."""

    def __init__(self) -> None:
        super().__init__([])
        self.machines = HOSTS
        self.tasks: list[ServerTask] = []

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        return HOSTS[HOSTS.index(machine) + 1]

    def start(self, machine: Machine, program: HostProgram) -> Any:
        task = msgspec.json.decode(program.given, type=ServerTask)
        self.tasks.append(task)
        port = 7000 + len(self.tasks)
        listens = ServerListens(port, "unix:/s", f"tcp:{task.address}:{port}")
        program.on_line(msgspec.json.encode(listens).decode())
        self.started.append(SaidServer())
        return self.started[-1]


@contextmanager
def started(
    tmp_path: Path, replication: Replication, shown: Screen
) -> Iterator[tuple[RemoteServers, MovingHosts, queue.SimpleQueue[Event]]]:
    spec = LaunchSpec(
        [sys.executable], 2, RunConfig(), 2 * replication.replicas, replication=replication
    )
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with MovingHosts() as machines:
        sink, logs = OutputSink(events.put), LogFiles(None)
        own = (machines, bytes(32))
        run = RemoteRun(spec, RunDir(tmp_path), events, shown, logs, sink, *own)
        hosts = servers_in_turn(HOSTS[:2], spec.servers, replication)
        with RemoteServers(run, hosts) as servers:
            assert servers.start_all()
            yield servers, machines, events


def test_workers_of_its_host_reach_a_server_by_its_socket(tmp_path: Path) -> None:
    with started(tmp_path, Replication(), Screen()) as (servers, machines, _):
        addresses = servers.for_workers(RunConfig()).servers
        name = tmp_path.name
        assert addresses == (
            f"tcp:10.0.0.1:7001|unix:/s|{name}-a",
            f"tcp:10.0.0.2:7002|unix:/s|{name}-b",
        )
        assert "secret" not in str(machines.tasks[0].variables).lower()


def test_a_lost_replica_starts_again_on_another_host(tmp_path: Path) -> None:
    shown = Screen()
    with started(tmp_path, TWO_COPIES, shown) as (servers, machines, events):
        config = servers.for_workers(RunConfig())
        assert config.coordinator == "tcp:10.0.0.1:7001"
        assert config.servers == tuple(
            f"tcp:10.0.0.{host}:700{n}" for n, host in zip((2, 3, 4, 5), (1, 2, 2, 1), strict=True)
        )
        assert machines.tasks[1].variables["SHOAL_COORDINATOR"] == "tcp:10.0.0.1:7001"
        machines.started[2].send_signal(
            signal.SIGKILL
        )  # server 1, on b; process 0 is the coordinator
        exit = events.get(timeout=10)
        assert isinstance(exit, ProcessExit)
        assert (exit.rank, exit.returncode, exit.role) == (1, -9, "server")
        assert servers.policy.note(exit) and servers.policy.survives(exit)
        assert servers.policy.replaces(exit)
        servers.start_again(1)
        for thread in servers._restarting:
            thread.join()
        assert machines.tasks[-1].index == 1 and machines.tasks[-1].address == "10.0.0.3"
        assert servers.host_of(1) == "c"
    assert "server 1 (shard 0, replica 1) starts again on c" in shown.err


@pytest.mark.whole
def test_a_server_of_another_host_is_killed_at_a_step(tmp_path: Path) -> None:
    """The run goes on with the other copy of its shard."""
    body = """
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=60):
        job.log(loss=step(batch))
"""
    (tmp_path / "train.py").write_text(scripts.script(body))
    strategy = as_strategy("ps(servers=1, replicas=2)")
    config = replace(RunConfig.from_environment(), strategy=str(strategy), kill=("server:1@30",))
    config = config.with_environ(TMPDIR=str(tmp_path))
    spec = LaunchSpec([sys.executable, str(tmp_path / "train.py")], 2, config)
    replication = replication_of(strategy, 2, 0)
    spec = replace(spec, servers=strategy.servers(2), replication=replication)
    shown = Screen()
    with HostsHere([1, 1]) as machines:
        run_attempts(machines, spec, shown)
    assert "server 1 (shard 0, replica 1" in shown.err + shown.out
    assert "step 360/360" in shown.err + shown.out
