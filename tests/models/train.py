"""Train one model of the zoo: `shoal verify tests/models/train.py -n 2 -s ddp -- bert`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

import shoal

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.catalog import CATALOG

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def train(job: shoal.Job) -> None:
    entry = CATALOG[sys.argv[1]]
    step = job.step(entry.build(), entry.loss, optimizer=ADAMW)
    for batch in job.batches(entry.dataset(24), batch_size=8):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
