"""An exponential moving average of the weights, which is what is tested and saved.

shoal run -n 2 -s "zero(3)" examples/own_loops/averaging.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.commands.examples.digits import load_digits, metrics


def train(job: shoal.Job) -> None:
    train_set, test_set = load_digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = job.setup(model, optimizer)
    ema = job.ema(model, 0.98)
    for x, y in job.batches(train_set, batch_size=64, epochs=3):
        job.log(loss=job.backward(F.cross_entropy(model(x), y)))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    job.print("weights:", job.evaluate(metrics, test_set))
    with ema.applied():
        job.print("average:", job.evaluate(metrics, test_set))


if __name__ == "__main__":
    shoal.run(train)
