"""Server processes, a coordinator and workers as processes, in a run directory of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.runtime.config import RunConfig, ServerCheckpointConfig, ServerConfig
from shoal.runtime.run_dir import RunDir
from shoal.server.chain import ChainConfig
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.coordinator import Unavailable, forget
from shoal.server.coordinator.client import RemoteCoordinator
from tests import forked
from tests.failpoints import VARIABLE
from tests.server.coordinator.helpers import until
from tests.server.helpers import SECRET, client_at
from tests.server.replicas.world import push_one_hot

START_S = 60.0
NO_CHECKPOINT = ServerCheckpointConfig()
COORDINATOR = "coordinator"
WORKER = "worker"
Name = int | str
NONE: Mapping[Name, str] = {}


def make_client(
    run_dir: RunDir, replicas: int, rank: int = 0, generation: int = 0, workers: int = 1
) -> Client:
    """It waits until the servers have started."""
    rule = Rule(workers, asynchronous=True)
    secret = run_dir.read_secret()
    assert secret is not None
    addresses = [run_dir.socket(replica) for replica in range(replicas)]
    return client_at([addresses], rank, rule, secret, generation=generation)


class Processes:
    """One shard with `replicas` server processes; `failpoints` by process."""

    def __init__(
        self,
        folder: Path,
        replicas: int = 3,
        failpoints: Mapping[Name, str] = NONE,
        lease_s: float | None = None,
        checkpoint: ServerCheckpointConfig = NO_CHECKPOINT,
    ):
        self.run_dir = RunDir(folder)
        self.run_dir.write_secret(SECRET)
        self.replicas = replicas
        self.config = RunConfig(
            run_dir=self.run_dir,
            coordinator=self.run_dir.coordinator,
            lease_s=lease_s,
            server_checkpoint=checkpoint,
        )
        self.processes: dict[Name, subprocess.Popen[str]] = {}
        self._coordinator = RemoteCoordinator(self.run_dir.coordinator, SECRET)
        for name in (COORDINATOR, *range(replicas)):
            self.start(name, failpoints.get(name))

    def start(self, name: Name, failpoint: str | None = None) -> None:
        """A server, or the coordinator; also in the place of one that was killed."""
        config = self.config.with_environ(**{VARIABLE: failpoint or ""})
        if name == COORDINATOR:
            self._start(name, config, "shoal.server.coordinator.main")
            return
        assert isinstance(name, int)
        parent = forked.zygote().process.pid
        server = ServerConfig(index=name, replicas=self.replicas, parent_pid=parent)
        self.run_dir.remove_socket(name)
        self._start(name, replace(config, server=server), "shoal.server.main")

    def start_worker(self, rank: int, generation: int, workers: int) -> None:
        """See `push_what_is_read`."""
        numbers = map(str, (self.replicas, rank, generation, workers))
        self._start(WORKER, self.config, "tests.server.replicas.processes", *numbers)

    def _start(self, name: Name, config: RunConfig, module: str, *arguments: str) -> None:
        pipe = subprocess.PIPE if name == WORKER else None
        command = [sys.executable, "-m", module, *arguments]
        environment = config.to_environment()
        self.processes[name] = forked.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def client(self, rank: int = 0, workers: int = 1) -> Client:
        return make_client(self.run_dir, self.replicas, rank, workers=workers)

    def members(self) -> tuple[int, ...]:
        """As the coordinator knows them; () while it does not answer."""
        with suppress(Unavailable):
            stored = self._coordinator.get("chain/0")
            if stored is not None:
                return msgspec.msgpack.decode(stored.value, type=ChainConfig).members
        return ()

    def push(self, element: int) -> None:
        """Ask the worker to push; `answered` waits for it."""
        pipe = self.processes[WORKER].stdin
        assert pipe is not None
        pipe.write(f"{element}\n")
        pipe.flush()

    def answered(self) -> int | None:
        """The element whose push was acknowledged; None if the worker was killed."""
        pipe = self.processes[WORKER].stdout
        assert pipe is not None
        line = pipe.readline()
        return int(line) if line.endswith("\n") else None

    def wait_dead(self, name: Name) -> int:
        """Report a lost server to the coordinator, as the launcher does."""
        returncode = self.processes[name].wait(START_S)
        if isinstance(name, int):
            with suppress(Unavailable):
                forget(self._coordinator, name, self.processes[name].pid)
        return returncode

    def wait_stopped(self, name: Name) -> None:
        stat = Path(f"/proc/{self.processes[name].pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"{name} stops")

    def kill(self, name: Name) -> None:
        self.processes[name].kill()
        self.wait_dead(name)

    def signal(self, name: Name, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def close(self) -> None:
        self._coordinator.close()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()


def push_what_is_read() -> None:
    """A worker process: it pushes the elements that it reads, and writes those acknowledged."""
    replicas, rank, generation, workers = map(int, sys.argv[1:])
    run_dir = RunConfig.from_environment().run_dir
    assert run_dir is not None
    client = make_client(run_dir, replicas, rank, generation, workers)
    step = client.enter().step if client.comes_back else 0
    for line in sys.stdin:
        push_one_hot(client, int(line), step)
        step += 1
        print(line, end="", flush=True)


if __name__ == "__main__":
    push_what_is_read()
