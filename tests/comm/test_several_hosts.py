"""Runs over two hosts (network namespaces) equal one device, and let no stranger in."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.secret import new_secret
from shoal.transport.tcp.transport import is_built
from tests import namespaces
from tests.namespaces import Host

SCRIPT = """
import torch, shoal
from torch import nn

def train(job):
    torch.manual_seed(1)
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64),
              nn.Tanh(), nn.Linear(64, 3)]
    x = torch.randn(96, 8)
    y = (x.sum(1) > 0).long()
    step = job.step(nn.Sequential(*layers), nn.functional.cross_entropy,
                    optimizer=shoal_optimizer)
    data = torch.utils.data.TensorDataset(x, y)
    losses = [float(step(batch)) for _ in range(2) for batch in job.batches(data, 12)]
    if job.rank == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses), flush=True)

from functools import partial
shoal_optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
shoal.run(train)
"""
_RUN_S = 120

pytestmark = [
    pytest.mark.skipif(not is_built(), reason="the native part is not built"),
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not()),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with namespaces.two_hosts() as made:
        yield made


def run(
    hosts: tuple[Host, Host], folder: Path, strategy: str, per_host: int, variables: dict[str, str]
) -> list[str]:
    """What torchrun printed on each host."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    outside = {n: t for n, t in os.environ.items() if not n.startswith("SHOAL_")}
    started = [
        host.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(rank), "--nproc-per-node", str(per_host)),
                *("--master-addr", hosts[0].address, "--master-port", str(port), str(script)),
            ],
            {
                **outside,
                "HOME": str(folder),
                "SHOAL_STRATEGY": strategy,
                "SHOAL_HOST": host.address,
                "SHOAL_HOST_ID": host.name,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": host.device,
                **variables,
            },
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        return [process.communicate(timeout=_RUN_S)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, 9)


def losses(text: str) -> list[float]:
    found = re.search(r"losses (.*)", text)
    assert found, text[-3000:]
    return [float(word) for word in found[1].split()]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    script = tmp_path_factory.mktemp("single") / "train.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=_RUN_S)
    return losses(ran.stdout + ran.stderr)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("strategy", "per_host"),
    [
        ("ddp", 1),
        ("ddp", 2),
        ('ddp(algorithm="tree")', 1),
        ("ps(servers=2)", 1),
        ("pp(4)", 2),
        ("tp(2) + ddp", 2),
    ],
)
def test_a_strategy_over_two_hosts_equals_one_device(
    hosts: tuple[Host, Host], tmp_path: Path, single: list[float], strategy: str, per_host: int
) -> None:
    """With a key alone: nothing asks for a trusted network."""
    key = {"SHOAL_SECRET": new_secret().hex()}
    if strategy.startswith("ps"):  # its servers ask for TLS or for a trusted network
        key["SHOAL_TRUSTED_NETWORK"] = "1"
    texts = run(hosts, tmp_path, strategy, per_host, key)
    assert losses("".join(texts)) == pytest.approx(single, abs=2e-4)


@pytest.mark.whole
def test_without_a_key_nothing_starts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    texts = run(hosts, tmp_path, "ddp", 1, {})
    assert "shoal keys" in "".join(texts) and "losses" not in "".join(texts)
