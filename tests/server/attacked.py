"""Server processes with few descriptors, and workers that train while a stranger attacks them."""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from shoal.runtime.config import RunConfig, ServerConfig, TlsConfig
from shoal.runtime.run_dir import RunDir
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.sync.ps.connect import ServedOptions, specs_of
from tests.coordinator.helpers import until
from tests.processes import resident_mb
from tests.server.helpers import SECRET, flat_of

DESCRIPTORS = 256  # of a server process: fewer than a flood has connections
PATIENCE_S = 60.0
LR = 1e-3


@dataclass
class Attacked:
    """A server process, and what it took before the attacks."""

    name: str
    process: subprocess.Popen[bytes]
    local: str
    remote: str
    tls: TlsConfig
    specs: list[object] = field(default_factory=list)
    start_mb: float = 0.0
    start_descriptors: int = 0
    most_descriptors: int = 0

    def resident_mb(self) -> float:
        return resident_mb(self.process.pid)

    def descriptors(self) -> int:
        count = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        self.most_descriptors = max(self.most_descriptors, count)
        return count

    def connect(self, is_remote: bool = False) -> socket.socket:
        """As a stranger does, without TLS."""
        if is_remote:
            host, port = self.remote.removeprefix("tcp:").split(":")
            return socket.create_connection((host, int(port)), PATIENCE_S)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.local.removeprefix("unix:"))
        return sock


@contextmanager
def server(folder: Path, name: str, tls: TlsConfig) -> Iterator[Attacked]:
    run_dir = RunDir(folder / name)
    run_dir.path.mkdir(mode=0o700)
    run_dir.write_secret(SECRET)
    config = replace(
        RunConfig.from_environment(),
        run_dir=run_dir,
        server=ServerConfig(0, None, "tcp:127.0.0.1:0", os.getpid()),
        tls=tls,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.server.main"],
        env=config.to_environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
    )
    try:
        address = run_dir.server_address(0)
        until(lambda: address.exists() or process.poll() is not None, "it starts")
        yield Attacked(name, process, run_dir.socket(0), address.read_text(), tls)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Training(threading.Thread):
    """A worker that pushes and pulls over the network, and compares every weight it gets."""

    def __init__(self, attacked: Attacked):
        super().__init__(name=f"training at {attacked.name}")
        self.steps = 0
        self.wrong = ""
        self._ending = threading.Event()
        self._client = open_client(attacked, attacked.remote, 7)
        attacked.specs = list(self._client.specs)

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self._step()
            self._client.leave()
        except Exception as error:
            self.wrong = self.wrong or f"{type(error).__name__}: {error}"
        finally:
            self._client.close()

    def end(self) -> None:
        self._ending.set()
        self.join(PATIENCE_S)

    def _step(self) -> None:
        client = self._client
        if not self.steps:
            client.pull(None, 0).wait()
            self._expected = client.inbox[: client.size].clone()
        client.out[0].fill_(1.0)
        client.push(slice(0, client.size))
        heads = torch.ones(1, 1 + client.specs[0].parameters)
        client.commit(Commit(self.steps, self.steps, 1.0), heads)
        self.steps += 1
        client.pull(None, self.steps).wait()
        for piece in client.specs[0].slices:
            stop = piece.start + math.prod(piece.shape)
            self._expected[piece.start : stop].add_(torch.ones(()), alpha=-LR)
        if not torch.equal(client.inbox[: client.size], self._expected):
            self.wrong = f"weights after step {self.steps} are not those of its own pushes"
            self._ending.set()


def open_client(attacked: Attacked, address: str, model: int) -> Client:
    served = ServedOptions(Rule(1), optimizer=NamedOptimizer("SGD", {"lr": LR}))
    specs = specs_of(flat_of(), [address], served)
    return Client(0, model, [address], SECRET, specs, RunConfig(tls=attacked.tls))
