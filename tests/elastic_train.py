"""The script of elastic runs that are disturbed: it notes in a folder where each worker is.

    shoal run tests/elastic_train.py -n 4 -s 'zero(2, elastic=True)' -- FOLDER STEPS RECIPE [WAITS]

RECIPE is `tally`, or `counts` for strategies that average weights, whose bits depend on who was
there. Files of the folder: `log` (time, worker, step, and the processes of the group, a line for
each step of a worker), `process-N` (process id, incarnation), `saved`. Until there is `enough`,
steps of several workers are slow, so that there is time to disturb them. After step WAITS they wait
until a worker has come later.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.runtime.config import RunConfig
from shoal.runtime.files import write_atomically

SAMPLES = 96
BATCH = 24
PAUSE_S = 0.05
LONG_PAUSE_S = 0.5  # in the second half of the steps, and while a worker is away


class Counts(nn.Module):
    """With a learning rate of the batch size, each training of sample i takes 1 from weight i."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows[:, -SAMPLES:] @ self.counts).mean()


class Tally(Counts):
    """A classifier that returns its loss, and counts how often each sample is trained.

    A row is 6 features, the class, and the sample as a one-hot vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, rows: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.layers(rows[:, :6]), rows[:, 6].long())
        return loss + super().forward(rows)


class CountingAdam(torch.optim.Adam):
    """Adam, but for the parameter that counts samples."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.shape == (SAMPLES,) and p.grad is not None:
                p -= BATCH * p.grad
                p.grad = None
        return super().step(closure)


def train(job: shoal.Job) -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    features, targets = torch.randn(SAMPLES, 6), (torch.arange(SAMPLES) % 3).float()
    rows = torch.cat([features, targets[:, None], torch.eye(SAMPLES)], 1)
    if sys.argv[3] == "tally":
        step = job.step(Tally(), None, optimizer=partial(CountingAdam, lr=0.01), exact=True)
    else:
        step = job.step(Counts(), None, optimizer=partial(torch.optim.SGD, lr=BATCH))
    incarnation = RunConfig.from_environment().incarnation
    write_atomically(folder / f"process-{job.rank}", f"{os.getpid()} {incarnation}")
    if incarnation:
        (folder / "late").touch()
    for batch in job.batches(TensorDataset(rows), BATCH, epochs=steps, steps=steps):
        job.log(loss=step(batch))
        if job.size > 1:
            _note(job, folder)
            is_long = job.replicas < job.size or job.steps > steps // 2
            if not (folder / "enough").exists():
                time.sleep(LONG_PAUSE_S if is_long else PAUSE_S)
            while sys.argv[4:] == [str(job.steps)] and not (folder / "late").exists():
                time.sleep(0.01)
    job.save(folder / "saved")


def _note(job: shoal.Job, folder: Path) -> None:
    """What was done, in one write."""
    assert job._elastic is not None
    members = job._elastic.group.membership.generation.members
    processes = ",".join(f"{worker}.{incarnation}" for worker, incarnation in members)
    with (folder / "log").open("a") as file:
        file.write(f"{time.monotonic()} {job.rank} {job.steps} {processes}\n")


if __name__ == "__main__":
    shoal.run(train)
