"""Training on replicated servers that are threads, some of which end while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.comm.group import Group
from shoal.server.chain.node import ChainConsistency
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.server.helpers import SECRET
from tests.server.replicas.world import World as Chains
from tests.server.replicas.world import world as chains

CPU = torch.device("cpu")
STEPS = 8
CRASH_AT = 3


class OneHot(nn.Module):
    """The gradient of its mean output is the mean of its one-hot samples, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :8] * self.weight).sum(1) + (x[:, 8:] * self.more).sum(1)


class Rows(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        optimizer = partial(torch.optim.Adagrad, lr=0.1)
        self.rows = shoal.Embedding(50, 4, padding_idx=3, optimizer=optimizer, **options)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(ids).mean(1))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def one_hot_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = F.one_hot(torch.randint(0, 16, (8 * STEPS,), generator=generator), 16).float()
    return TensorDataset(x, torch.zeros(len(x)))


def row_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    ids = (50 * torch.rand(8 * STEPS, 3, generator=generator) ** 2).long()
    return TensorDataset(ids, torch.randint(0, 3, (len(ids),), generator=generator))


def dense_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * STEPS, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def mean_output(out: Tensor, target: Tensor) -> Tensor:
    return out.mean()


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    report: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is trained; `crash` is the shard and replica of the server that ends."""

    make: Any
    data: Any
    loss: Any
    optimizer: Any = field(default_factory=lambda: partial(torch.optim.Adam, lr=0.01))
    options: dict[str, Any] = field(default_factory=dict)


ONE_HOT = Task(OneHot, one_hot_data, mean_output, partial(torch.optim.SGD, lr=1.0))
DENSE = Task(Mlp, dense_data, F.cross_entropy)
CLIPPED = Task(Mlp, dense_data, F.cross_entropy, options={"clip_norm": 0.1})
EXACT = Task(Mlp, dense_data, F.cross_entropy, options={"exact": True})
ROWS = Task(Rows, row_data, F.cross_entropy, partial(torch.optim.SGD, lr=0.1))
SOME_ROWS = Task(
    partial(Rows, min_count=2, ttl_steps=2),
    row_data,
    F.cross_entropy,
    partial(torch.optim.SGD, lr=0.1),
)


@contextmanager
def launched_chains(
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
    replicas: int = 3,
    consistency: ChainConsistency = "strong",
) -> Iterator[Chains]:
    with chains(replicas, shards, consistency) as made:
        addresses = [address for shard in made.addresses for address in shard]
        monkeypatch.setenv("SHOAL_SERVERS", ",".join(addresses))
        monkeypatch.setenv("SHOAL_SECRET", SECRET.hex())
        yield made


def train(
    world: World,
    task: Task,
    strategy: str,
    workers: int = 2,
    made: Chains | None = None,
    crash: tuple[int, int] | None = None,
    lost: int = 0,
) -> list[Trained]:
    """With the server that ends, the last `lost` operations are lost."""
    models = [task.make() for _ in range(workers)]

    def body(group: Group) -> Trained:
        model = models[group.rank]
        job = Job(parse(strategy), group, device=CPU, seed=3)
        step = job.step(model, task.loss, optimizer=task.optimizer, **task.options)
        losses = []
        for number, batch in enumerate(job.batches(task.data(), 8)):
            if number == CRASH_AT and group.rank == 0 and made is not None and crash is not None:
                if lost:
                    threading.Thread(target=made.crash_with, args=(*crash, lost)).start()
                else:
                    made.crash(*crash)
            losses.append(float(step(batch)))
        with step.sync.full_weights():
            weights = {
                name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta
            }
            if isinstance(model, Rows):
                weights["rows"] = model.rows(torch.arange(50)).detach().clone()
        group.barrier().wait()
        job.close()
        return Trained(losses, weights, step.sync.report())

    return world(workers, body)
