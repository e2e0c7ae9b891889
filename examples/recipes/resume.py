"""Training that goes on where it was stopped: the loop of the tutorials, unchanged.

The epoch is saved beside the model, and the loop begins with it. Batches of an epoch that was
interrupted are skipped where they were trained on. Stop it at any time and start it again, with
another strategy or number of workers if you like:

shoal run -n 2 examples/recipes/resume.py --folder curve
shoal run -n 4 -s "zero(2)" examples/recipes/resume.py --folder curve
shoal verify -n 2 -s ddp examples/recipes/resume.py
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

EPOCHS = 20


def train(job: shoal.Job, checkpoint: Path | None) -> None:
    x = torch.linspace(-2, 2, 2048)[:, None]
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    step = job.step(model, F.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    start = 0
    if checkpoint is not None and checkpoint.exists():
        start = job.load(checkpoint)["epoch"]  # after job.step, before job.batches
        job.print(f"goes on with epoch {start}, after {job.steps} steps")
    for epoch in range(start, EPOCHS):
        for batch in job.batches(TensorDataset(x, torch.sin(3 * x)), batch_size=64):
            job.log(loss=step(batch))
            if checkpoint is not None and job.steps % 100 == 0:
                job.save(checkpoint, {"epoch": epoch})
        if checkpoint is not None:
            job.save(checkpoint, {"epoch": epoch + 1})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    shoal.run(partial(train, checkpoint=parser.parse_args().folder))
