"""Scripts of other frameworks over the backend; each is skipped where it is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.transport.shm.segment import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
ROOT = Path(__file__).parents[2]

ACCELERATE = """
import torch, torch.distributed as dist, shoal
from accelerate import Accelerator
from tests.comm.test_frameworks import data, model, say, sgd, train

dist.init_process_group("shoal")  # on CPUs Accelerate takes the group that there is, or Gloo
accelerator = Accelerator(cpu=True)
net = model()
loader = torch.utils.data.DataLoader(data(), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, sgd(net), loader)
train(net, optimizer, loader, accelerator.backward)
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
if accelerator.is_main_process:
    say(ranks, dist.get_backend(), accelerator.unwrap_model(net))
accelerator.end_training()
"""
FABRIC = """
import torch, torch.distributed as dist, shoal
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from tests.comm.test_frameworks import data, model, say, sgd, train

strategy = DDPStrategy(process_group_backend="shoal")
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
net = model()
net, optimizer = fabric.setup(net, sgd(net))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data(), batch_size=4))
train(net, optimizer, loader, fabric.backward)
ranks = fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist()
fabric.barrier()
if fabric.is_global_zero:
    say(ranks, dist.get_backend(), net.module)
"""


def data() -> TensorDataset:
    return TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, backward: Any) -> None:
    for _ in range(3):
        for (batch,) in loader:
            optimizer.zero_grad()
            backward(net(batch).square().mean())
            optimizer.step()


def say(ranks: list[int], backend: str, net: nn.Module) -> None:
    weights = [value for p in net.parameters() for value in p.flatten().tolist()]
    print(json.dumps([ranks, backend, weights]))


@pytest.mark.parametrize(
    ("framework", "script"), [("accelerate", ACCELERATE), ("lightning_fabric", FABRIC)]
)
def test_two_processes_give_the_weights_of_one(tmp_path: Path, framework: str, script: str) -> None:
    pytest.importorskip(framework)
    (tmp_path / "script.py").write_text(script)
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks, backend, weights = json.loads(done.stdout.splitlines()[-1])
    alone = model()
    train(alone, sgd(alone), DataLoader(data(), batch_size=8), torch.Tensor.backward)
    expected = [value for p in alone.parameters() for value in p.flatten().tolist()]
    assert (ranks, backend) == ([0, 1], "shoal") and weights == pytest.approx(expected, abs=1e-6)
