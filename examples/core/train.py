"""Train one model under each strategy: `python -m examples.core.train`.

The batch is global, each replica has a share of it, and a loss is a sum over samples divided by
the size of the global batch: so the replicas' gradients add up to those of one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from examples.core.flat import FlatModel
from examples.core.pipeline import run_stage
from examples.core.server import PsWorker, Server
from examples.core.sync import Ddp, Single, Sync, Zero1
from examples.core.world import World, run_ranks

BATCH = 16
STEPS = 5


class Trained:
    """The loss of each step, and the weights after the last one."""

    def __init__(self, losses: list[float], weights: Tensor) -> None:
        self.losses = losses
        self.weights = weights


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 5)
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 12, generator=generator)
    return inputs, torch.randint(5, (BATCH,), generator=generator)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / BATCH


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def train_replica(flat: FlatModel, sync: Sync, rank: int, replicas: int) -> list[float]:
    """For real: shoal/train/step/."""
    flat.watch(sync.reduce)
    losses = []
    for step in range(STEPS):
        inputs, targets = (whole.tensor_split(replicas)[rank] for whole in batch_of(step))
        sync.begin()
        flat.begin_step()
        loss = loss_of(flat.model(inputs), targets)
        loss.backward()
        sync.finish()
        losses.append(loss.item())
    return losses


def train_replicas(replicas: int, make_sync: Callable[[World, int, FlatModel], Sync]) -> Trained:
    """Every replica's loss is its share of the step's; after a step all have the same weights."""
    world = World(replicas)
    models = [FlatModel(make_model(), bucket_elements=400) for _ in range(replicas)]

    def work(rank: int) -> list[float]:
        sync = make_sync(world, rank, models[rank])
        return train_replica(models[rank], sync, rank, replicas)

    shares = run_ranks(world, work)
    return Trained([sum(losses) for losses in zip(*shares, strict=True)], models[0].values)


def single() -> Trained:
    return train_replicas(1, lambda world, rank, flat: Single(flat, adam))


def ddp(replicas: int) -> Trained:
    return train_replicas(replicas, lambda world, rank, flat: Ddp(flat, adam, world, rank))


def zero1(replicas: int) -> Trained:
    return train_replicas(replicas, lambda world, rank, flat: Zero1(flat, adam, world, rank))


def ps(replicas: int) -> Trained:
    server = Server(FlatModel(make_model(), bucket_elements=400).values, adam, replicas)
    trained = train_replicas(replicas, lambda world, rank, flat: PsWorker(flat, server, rank))
    return Trained(trained.losses, server.pull(STEPS))


def pipeline(micro_batches: int) -> Trained:
    """Two stages: each is trained by its own worker, which knows nothing of the other's layers."""
    whole = make_model()
    stages = [whole[:2], whole[2:]]
    world = World(len(stages))

    def work(stage: int) -> list[float]:
        part = copy.deepcopy(stages[stage])
        optimizer = adam(list(part.parameters()))
        losses = []
        for step in range(STEPS):
            inputs, targets = batch_of(step)
            pieces = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
            optimizer.zero_grad()
            losses.append(run_stage(world, stage, part, list(pieces), loss_of))
            optimizer.step()
        stages[stage] = part
        return losses

    losses = run_ranks(world, work)[-1]
    return Trained(losses, FlatModel(nn.Sequential(*stages), bucket_elements=400).values)


def main() -> None:
    expected = single()
    runs = {"ddp": ddp(4), "zero(1)": zero1(3), "ps": ps(4), "pp(2)": pipeline(4)}
    print("single  ", " ".join(f"{loss:.6f}" for loss in expected.losses))
    for name, trained in runs.items():
        furthest = (trained.weights - expected.weights).abs().max().item()
        losses = " ".join(f"{loss:.6f}" for loss in trained.losses)
        print(f"{name:8}", losses, f"  weights differ by {furthest:.0e} at most")


if __name__ == "__main__":
    main()
