"""What `start` starts: four steps of a small model, plain, with DistributedDataParallel, or Shoal.

python start_worker.py plain|torchrun|shoal FILE: each rank appends when its first step has ended.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 4
BATCHES = [(torch.ones(32, 64), torch.ones(32, dtype=torch.long))] * STEPS


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def note_first_step() -> None:
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{time.clock_gettime(time.CLOCK_MONOTONIC)}\n".encode())
    os.close(file)


def train_plain(trained: nn.Module) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for number, (inputs, targets) in enumerate(BATCHES):
        optimizer.zero_grad()
        F.cross_entropy(trained(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == 0:
            note_first_step()


def train_replicas() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train_plain(nn.parallel.DistributedDataParallel(model()))
    dist.destroy_process_group()


def train_with_shoal() -> None:
    import shoal

    def train(job: shoal.Job) -> None:
        step = job.step(model(), F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
        for number, batch in enumerate(job.batches(BATCHES)):
            step(batch)
            if number == 0:
                note_first_step()

    shoal.run(train)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        train_plain(model())
    elif sys.argv[1] == "torchrun":
        train_replicas()
    else:
        train_with_shoal()
