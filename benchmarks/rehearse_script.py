"""A small network on handwritten digits, without BatchNorm: what the rehearsed table trains.

shoal rehearse -n 16 --cluster benchmarks/clusters/racks.toml --slow 15:4x --until loss=1
    -s ddp -s "localsgd(every=8)" benchmarks/rehearse_script.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.commands.examples.digits import load_digits

STEPS = 48
BATCH = 256  # samples of all workers


def train(job: shoal.Job) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.5))
    for batch in job.batches(load_digits()[0], batch_size=BATCH, epochs=STEPS, steps=STEPS):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
