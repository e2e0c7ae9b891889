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

from shoal.comm.transport.shm.segment import is_built
from tests.models.zoo import import_torchvision

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
ROOT = Path(__file__).parents[2]

# what each script of the frameworks begins with
HEAD = """
import os, torch, torch.distributed as dist, shoal
from tests.models.zoo import import_torchvision
import_torchvision()
from tests.comm.test_frameworks import data, model, say, sgd, train
"""
ACCELERATE = """
from accelerate import Accelerator
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
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
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
LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return sgd(self.net)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="shoal"),
    max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
module = Net()
trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=4))
ranks = module.all_gather(torch.tensor([trainer.global_rank])).flatten().tolist()
if trainer.is_global_zero:
    say(ranks, dist.get_backend(), module.net)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model()
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}

dist.init_process_group("shoal")  # the Trainer takes the group that there is
args = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=3, learning_rate=0.1, optim="sgd",
    lr_scheduler_type="constant", max_grad_norm=0, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True,
)
trainer = Trainer(Net(), args, train_dataset=[{"x": row} for (row,) in data()])
trainer.train()
ranks = trainer.accelerator.gather(torch.tensor([dist.get_rank()])).tolist()
if dist.get_rank() == 0:
    say(ranks, dist.get_backend(), trainer.accelerator.unwrap_model(trainer.model).net)
"""
RAY = """
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
def loop(config):
    import shoal, torch.distributed as dist
    net = prepare_model(model())
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    train(net, sgd(net), ray.train.torch.prepare_data_loader(loader), torch.Tensor.backward)
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]))
    if dist.get_rank() == 0:
        say([int(rank) for rank in ranks], dist.get_backend(), net.module, config["answer"])

ray.init(num_cpus=3, include_dashboard=False, logging_level="error")
trainer = TorchTrainer(
    loop, train_loop_config={"answer": os.path.abspath("answer.json")},
    scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="shoal"),
)
trainer.fit()
ray.shutdown()
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


def say(ranks: list[int], backend: str, net: nn.Module, path: str = "answer.json") -> None:
    Path(path).write_text(json.dumps([ranks, backend, numbers(net)]))


def numbers(net: nn.Module) -> list[float]:
    return [value for p in net.parameters() for value in p.flatten().tolist()]


def trained_alone() -> list[float]:
    net = model()
    train(net, sgd(net), DataLoader(data(), batch_size=8), torch.Tensor.backward)
    return numbers(net)


def run(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(HEAD + script)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("framework", "script", "words"),
    [
        ("accelerate", ACCELERATE, TORCHRUN),
        ("lightning", FABRIC, TORCHRUN),
        ("lightning", LIGHTNING, TORCHRUN),
        ("transformers", TRAINER, TORCHRUN),
        ("ray.train", RAY, ["script.py"]),
    ],
    ids=["accelerate", "fabric", "lightning", "trainer", "ray"],
)
def test_two_processes_give_the_weights_of_one(
    tmp_path: Path, framework: str, script: str, words: list[str]
) -> None:
    import_torchvision()  # lightning imports it where it is installed
    pytest.importorskip(framework)
    run(tmp_path, script, *words)
    ranks, backend, weights = json.loads((tmp_path / "answer.json").read_text())
    assert (ranks, backend) == ([0, 1], "shoal")
    assert weights == pytest.approx(trained_alone(), abs=1e-6)


UNDER_SHOAL = """
from transformers import Trainer, TrainingArguments
from shoal.integrations.transformers import ShoalCallback
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model()
    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

def train(job):
    args = TrainingArguments(
        "out", per_device_train_batch_size=8, num_train_epochs=2, gradient_accumulation_steps=2,
        max_grad_norm=0.5, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )
    rows = [{"x": torch.randn(6), "labels": torch.tensor(i % 2)} for i in range(22)]
    trainer = Trainer(Net(), args, train_dataset=rows)
    trainer.add_callback(ShoalCallback(job, trainer))
    trainer.train()

shoal.run(train)
"""


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "ps"])
def test_the_trainer_under_a_strategy_equals_one_device(tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run(tmp_path, UNDER_SHOAL, "-m", "shoal", "verify", "-n", "2", "-s", strategy, "script.py")


@pytest.mark.whole
def test_bars_and_logs_of_the_trainer_come_from_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    shown = UNDER_SHOAL.replace("disable_tqdm=True", "logging_steps=1")
    done = run(tmp_path, shown, "-m", "shoal", "run", "-n", "2", "script.py")
    assert "[0] {'loss'" in done.stdout
    assert "[1] {" not in done.stdout
    assert "it/s" not in "".join(line for line in done.stderr.splitlines() if line[:3] == "[1]")
