"""Server processes and a coordinator process in a run directory of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.run_dir import RunDir
from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.sync.ps.connect import ServedOptions, specs_of
from tests.server.helpers import MODEL, SECRET, flat_of

START_S = 120.0


class Processes:
    """One shard with `replicas` server processes; `failpoints` by replica."""

    def __init__(self, folder: Path, replicas: int, failpoints: dict[int, str]):
        self.run_dir = RunDir(folder)
        self.run_dir.write_secret(SECRET)
        self.replicas = replicas
        self.config = RunConfig(run_dir=self.run_dir, coordinator=self.run_dir.coordinator)
        self.processes: dict[int | str, subprocess.Popen[bytes]] = {}
        self._start("coordinator", "shoal.coordinator.main", self.config)
        for replica in range(replicas):
            self.start(replica, failpoints.get(replica))

    def start(self, replica: int, failpoint: str | None = None) -> None:
        server = ServerConfig(index=replica, replicas=self.replicas, parent_pid=os.getpid())
        armed = () if failpoint is None else (failpoint,)
        config = RunConfig(
            run_dir=self.run_dir,
            coordinator=self.run_dir.coordinator,
            server=server,
            failpoints=armed,
        )
        self._start(replica, "shoal.server.main", config)

    def _start(self, name: int | str, module: str, config: RunConfig) -> None:
        environment = {**os.environ, **config.to_environment()}
        command = [sys.executable, "-m", module]
        self.processes[name] = subprocess.Popen(command, env=environment)

    def client(self, rank: int = 0) -> Client:
        """It waits until the servers have started."""
        served = ServedOptions(
            Rule(1, asynchronous=True), optimizer=NamedOptimizer("SGD", {"lr": 1.0})
        )
        addresses = [self.run_dir.socket(replica) for replica in range(self.replicas)]
        specs = specs_of(flat_of(), [addresses[0]], served)
        return Client(rank, MODEL, [addresses], SECRET, specs)

    def wait_dead(self, name: int | str) -> int:
        return self.processes[name].wait(START_S)

    def signal(self, name: int | str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


@contextmanager
def processes(
    folder: Path, replicas: int = 3, failpoints: dict[int, str] | None = None
) -> Iterator[Processes]:
    made = Processes(folder, replicas, failpoints or {})
    try:
        yield made
    finally:
        made.close()
