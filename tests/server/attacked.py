"""Server processes with few descriptors, workers that train meanwhile, and floods of strangers."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import ShoalError
from shoal.runtime.config import RunConfig, ServerConfig, TlsConfig
from shoal.runtime.run_dir import RunDir
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from shoal.server.model.named_optimizer import NamedOptimizer
from shoal.server.protocol import FrameKind, Header, pack
from shoal.sync.ps.plan import ServedOptions, specs_of
from tests.processes import resident_mb
from tests.server.coordinator.helpers import until
from tests.server.helpers import SECRET, fill, flat_of, weights

DESCRIPTORS = 256  # of a server process: fewer than a flood has connections
PATIENCE_S = 60.0


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
        self._client = open_client(attacked, 7)
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
        _, heads = fill(self._client, 1.0)
        self._client.commit(Commit(self.steps, self.steps, 1.0), heads)
        self.steps += 1
        if set(weights(self._client, self.steps).tolist()) != {-float(self.steps), 0.0}:
            self.wrong = f"weights after step {self.steps} are not those of its own pushes"
            self._ending.set()


def open_client(attacked: Attacked, model: int) -> Client:
    served = ServedOptions(Rule(1), optimizer=NamedOptimizer("SGD", {"lr": 1.0}))
    specs = specs_of(flat_of(), [attacked.remote], served)
    return Client(0, model, [attacked.remote], SECRET, specs, RunConfig(tls=attacked.tls))


# ------------------------------------------------------------------------------ floods


_models = itertools.count(100_000)  # of honest workers
Flood = Callable[[Attacked, int], Counter[str]]


def _flood_of(act: Callable[[Attacked, list[socket.socket]], None]) -> Flood:
    """Connections that stay open, unless `act` closes the latest; every 100 a worker joins."""

    def flood(attacked: Attacked, count: int) -> Counter[str]:
        ends: Counter[str] = Counter()
        held: list[socket.socket] = []
        for i in range(count):
            try:
                held.append(attacked.connect(is_remote=True))
                act(attacked, held)
                ends["connected"] += 1
            except OSError as error:
                ends[type(error).__name__] += 1
            if i % 100 == 99 or i == count - 1:
                attacked.descriptors()
                ends[_honest_join(attacked)] += 1
        for sock in held:
            sock.close()
        return ends

    return flood


def _drip(attacked: Attacked, held: list[socket.socket]) -> None:
    """A TLS record or a frame that never ends: a byte now and then."""
    half = b"\x16\x03\x01\x02\x00" if attacked.tls.certificate else pack(Header(FrameKind.HELLO))
    held[-1].sendall(half[: 1 + len(held) % (len(half) - 1)])
    with suppress(OSError):
        held[len(held) // 2].sendall(b"\x00")


def _reset(attacked: Attacked, held: list[socket.socket]) -> None:
    held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    held.pop().close()


silent_flood = _flood_of(lambda attacked, held: None)
dripping_flood = _flood_of(_drip)
hasty_flood = _flood_of(_reset)


def _honest_join(attacked: Attacked) -> str:
    try:
        client = open_client(attacked, next(_models))
        client.leave()
        client.close()
    except (ShoalError, OSError, ssl.SSLError) as error:
        return f"WRONG: an honest worker was kept out ({error})"[:200]
    return "honest workers served"
