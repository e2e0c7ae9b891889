"""Digits by an MLP whose passes take 20 and 40 ms, whatever the machine: it sleeps.

For `benchmarks rehearsed`: the hosts of a lab share the cores of one machine, so that what they
compute takes longer the more of them compute at once. Here each has a device of its own.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.commands.examples.digits import load_digits

FORWARD_S, BACKWARD_S = 0.020, 0.040
_LAYERS = 4


class _Pass(torch.autograd.Function):
    """The identity, which takes its time: so many times as long as on the other workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        time.sleep(factor * FORWARD_S / _LAYERS)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.factor * BACKWARD_S / _LAYERS)
        return grad, None


class Paced(nn.Module):
    def __init__(self, inputs: int, outputs: int, factor: float):
        super().__init__()
        self.factor = factor
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return _Pass.apply(F.relu(self.layer(x)), self.factor)  # type: ignore[no-untyped-call,no-any-return]


def model(width: int, factor: float) -> nn.Sequential:
    widths = [64] + [width] * _LAYERS
    layers = [Paced(a, b, factor) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


def train(job: shoal.Job, width: int, batch_size: int, steps: int, slow: str) -> None:
    data, _ = load_digits()
    rank, _, factor = slow.partition(":")
    net = model(width, float(factor) if rank == str(job.rank) else 1.0)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    step = job.step(net, F.cross_entropy, optimizer=optimizer)
    for batch in job.batches(data, batch_size, epochs=steps, steps=steps):
        job.log(loss=step(batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=320)  # 330,000 parameters, 1.3 MB
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow", default="", help="RANK:FACTOR")
    shoal.run(partial(train, **vars(parser.parse_args())))
