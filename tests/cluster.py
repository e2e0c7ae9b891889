"""A ps run over two hosts, with TLS and a secret that both are given."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.runtime.secret import new_secret
from tests.namespaces import Host
from tests.server.test_tls import certificate

RUN_S = 150.0
SCRIPT = """
import hashlib, os, sys, torch, shoal
from torch import nn

def train(job):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(240, 8)
    y = (x.sum(1) > 0).long()
    step = job.step(model, nn.functional.cross_entropy,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    data = torch.utils.data.TensorDataset(x, y)
    losses = [float(step(batch)) for _ in range(4) for batch in job.batches(data, 12)]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print("weights", digest.hexdigest(), f"{losses[0]:.3f} {losses[-1]:.3f}", flush=True)

shoal.run(train)
"""


@dataclass(frozen=True)
class Ended:
    """How a run ended on both hosts."""

    statuses: tuple[int, ...]
    output: str

    @property
    def _reports(self) -> list[list[str]]:
        lines = (line for line in self.output.splitlines() if "weights" in line)
        return [line.partition("weights")[2].split() for line in lines]

    @property
    def weights(self) -> set[str]:
        return {digest for digest, _, _ in self._reports}

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The first and the last loss of each worker."""
        return [(float(first), float(last)) for _, first, last in self._reports]


class Cluster:
    """Both hosts, with one key, one certificate, and the secret given to each."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path):
        self.hosts = hosts
        self.folder = folder
        self.secret = new_secret()
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        names = ",".join(f"IP:{host.address}" for host in hosts)
        self.cert, self.key = certificate(folder, "server", names)

    def environment(self, host: Host, strategy: str) -> dict[str, str]:
        return {
            **os.environ,
            "SHOAL_STRATEGY": strategy,
            "SHOAL_SECRET": self.secret.hex(),
            "SHOAL_HOST": host.address,
            "SHOAL_HOST_ID": host.name,
            **dict.fromkeys(("SHOAL_TLS_CERT", "SHOAL_TLS_CA"), str(self.cert)),
            "SHOAL_TLS_KEY": str(self.key),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), host.device),
            **dict.fromkeys(("OMP_NUM_THREADS", "PYTHONUNBUFFERED"), "1"),
        }

    def start(
        self, port: int, strategy: str = "ps(servers=2)", per_host: int = 1, **changes: str
    ) -> list[subprocess.Popen[str]]:
        """As docs/parameter-server.md says: torchrun on each host."""
        return [
            host.run(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(rank), "--nproc-per-node", str(per_host)),
                    *("--master-addr", self.hosts[0].address, "--master-port", str(port)),
                    str(self.script),
                ],
                {**self.environment(host, strategy), **changes},
            )
            for rank, host in enumerate(self.hosts)
        ]


def finish(processes: list[subprocess.Popen[str]]) -> Ended:
    """Both hosts; when one has ended with an error the other has a while to notice."""
    texts = ["", ""]

    def read(index: int) -> None:
        texts[index] = processes[index].communicate()[0]

    readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for reader in readers:
        reader.start()
    deadline_s = time.monotonic() + RUN_S
    try:
        for reader in readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))
        hangs = any(process.poll() is None for process in processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
    note = "\nHANGS" if hangs else ""
    return Ended(tuple(process.returncode for process in processes), "\n".join(texts) + note)


def pieces_of(secret: bytes) -> list[bytes]:
    """Every 8 bytes of it, as bytes and hexadecimal: a packet's border cannot hide all of them."""
    found = [base64.b64encode(secret)[:16]]
    for i in range(0, len(secret) - 7):
        piece = secret[i : i + 8]
        found += [piece, piece.hex().encode(), piece.hex().upper().encode()]
    return found


def free_port(host: Host) -> int:
    def body() -> int:
        with socket.socket() as sock:
            sock.bind((host.address, 0))
            return int(sock.getsockname()[1])

    return host.call(body)
