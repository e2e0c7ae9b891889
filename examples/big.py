"""An operator of 16 GB and one of 1 GB, weights and gradients: devices of 10 GB need two.

shoal memory -n 2 --limit 10GB -s ddp -s 'tp(2)' -s 'pp(2)' examples/big.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32768, 61036, bias=False)
        self.two = nn.Linear(61036, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.one(x))
        return result


def train(job: shoal.Job) -> None:
    data = TensorDataset(torch.zeros(2, 32768), torch.zeros(2, 2048))
    step = job.step(Two(), nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    for batch in job.batches(data, batch_size=2):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
