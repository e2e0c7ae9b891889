"""Coordinators of every kind, for tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from shoal.launch.here import coordinator
from shoal.launch.here.coordinator import RunCoordinator, coordinated
from shoal.launch.here.process_config import Replication
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.secret import new_secret
from shoal.server.coordinator import Answer, Conflict, Coordinator, Request
from shoal.server.coordinator.client import RemoteCoordinator, open_coordinator, open_etcd
from shoal.server.coordinator.service import CoordinatorService, Core
from shoal.server.coordinator.store_file import StoreFile
from tests.failpoints import VARIABLE
from tests.folders import socket_folder

SECRET = new_secret()
PATIENCE_S = 60.0
_ARMED = (sys.executable, "-m", "tests.failpoints", "shoal.server.coordinator.main")
Connect = Callable[[], Coordinator]


@contextmanager
def run_dir() -> Iterator[RunDir]:
    """With a path that is short enough for sockets."""
    with socket_folder() as folder:
        found = RunDir(folder)
        found.write_secret(SECRET)
        yield found


@contextmanager
def service(tcp: bool = False) -> Iterator[CoordinatorService]:
    """In this process, at a socket."""
    with run_dir() as folder:
        core = Core(StoreFile(folder.coordinator_store))
        address = "tcp:127.0.0.1:0" if tcp else folder.coordinator
        with CoordinatorService(core, SECRET, [address]) as found:
            yield found


@contextmanager
def served() -> Iterator[Connect]:
    with service() as found, ExitStack() as stack:
        yield lambda: stack.enter_context(RemoteCoordinator(found.addresses[0], SECRET))


@contextmanager
def etcd_run(hosts: str, call_s: float = PATIENCE_S) -> Iterator[Connect]:
    """Coordinators of one run in a cluster; its keys are removed at the end."""
    secret = new_secret()
    with ExitStack() as stack:

        def connect() -> Coordinator:
            found = open_etcd(RunConfig(), f"etcd://{hosts}", secret, "a test", call_s)
            return stack.enter_context(found)

        yield connect
        with open_etcd(RunConfig(), f"etcd://{hosts}", secret, "a test", call_s) as last:
            last.remove_all()
            assert last.list("").entries == {}


class Said(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


@dataclass
class Embedded:
    """A coordinator in a process of its own, which is started again whenever it dies."""

    run_dir: RunDir
    process: RunCoordinator
    client: Coordinator
    said: Said = field(default_factory=Said)

    def signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def embedded(failpoint: str = "") -> Iterator[Embedded]:
    """The launcher's; its first process has this failpoint."""
    said = Said()
    with run_dir() as folder, ExitStack() as stack:
        config = RunConfig.from_environment({**os.environ, VARIABLE: failpoint})
        with patch.object(coordinator, "COORDINATOR_COMMAND", _ARMED):
            process = stack.enter_context(coordinated(Replication(2), config, folder, said))
        process.watch(lambda listing: None)
        reached = replace(process.config, run_dir=folder)
        client = stack.enter_context(open_coordinator(reached, "a test", 20.0))
        yield Embedded(folder, process, client, said)


def until(holds: Callable[[], bool], what: str, patience_s: float | None = None) -> None:
    deadline_s = time.monotonic() + (patience_s or PATIENCE_S)
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def changed(coordinator: Coordinator, times: int, leases: bool = False) -> list[int]:
    """Versions of a key that is written so often, and deleted after every tenth time."""
    seen: list[int] = []
    version = 0
    for number in range(times):
        lease = coordinator.grant(60.0, "x").id if leases else None
        version = coordinator.put_if("a", b"%d" % number, version, lease).version
        seen.append(version)
        if number % 10 == 9:
            coordinator.delete_if("a", version)
            version = 0
    return seen


def count(coordinator: Coordinator) -> int:
    found = coordinator.get("counter")
    return 0 if found is None else int(found.value[:20])


def incremented(
    coordinator: Coordinator, is_done: Callable[[list[int]], bool], padding: bytes = b""
) -> list[int]:
    """Versions of a counter that is increased by compare-and-set."""
    versions: list[int] = []
    while not is_done(versions):
        found = coordinator.get("counter")
        number = int(found.value[:20]) if found is not None else 0
        version = found.version if found is not None else 0
        try:
            value = b"%020d" % (number + 1) + padding
            versions.append(coordinator.put_if("counter", value, version).version)
        except Conflict:
            continue
    return versions


class LocalCoordinator(Coordinator):
    """Threads of one process share it. `clock_s` is what leases count in."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic):
        self._core = Core(clock_s=clock_s)

    def _ask(self, request: Request) -> Answer:
        return self._core.answer(request)

    def close(self) -> None:
        self._core.close()
