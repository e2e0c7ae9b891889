"""Fine-tuning: a frozen backbone, parameter groups, a scheduler, gradients of two batches a step.

The last layer of the backbone is unfrozen after the first epoch.

shoal run -n 2 -s "zero(2)" examples/own_loops/finetune.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import shoal
from shoal.commands.examples.digits import load_digits, metrics

EPOCHS = 2
ACCUMULATE = 2


def train(job: shoal.Job) -> None:
    train_set, test_set = load_digits()
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48))
    model = nn.Sequential(backbone, nn.GELU(), nn.Linear(48, 10))
    backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": backbone.parameters(), "lr": 1e-4},
            {"params": model[2].parameters(), "lr": 1e-2, "weight_decay": 0.0},
        ]
    )
    model, optimizer = job.setup(model, optimizer)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_set) // (64 * ACCUMULATE))
    for epoch in job.epochs(EPOCHS):
        backbone[3].requires_grad_(epoch > 0)
        for i, (x, y) in enumerate(job.batches(train_set, batch_size=64)):
            loss = F.cross_entropy(model(x), y)
            if (i + 1) % ACCUMULATE:
                with job.no_sync():  # nothing is sent: the gradients wait for the next batch
                    job.backward(loss / ACCUMULATE)
                continue
            job.log(loss=job.backward(loss / ACCUMULATE))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results = job.evaluate(metrics, test_set)
        job.print(f"epoch {epoch}: accuracy {results['accuracy']:.2%}")


if __name__ == "__main__":
    shoal.run(train)
