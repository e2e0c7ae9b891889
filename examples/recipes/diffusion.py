"""A diffusion model (DDPM): the time step and the noise of a sample are drawn in the dataset.

What a forward draws by itself depends on how a batch is cut over workers. Drawn in `__getitem__`
it follows from the seed, the epoch and the index of the sample. In a loop of your own
`job.rows(lambda n: torch.randn(n, 2))` draws for the global batch and gives a worker its rows.

shoal verify -n 2 -s ddp examples/recipes/diffusion.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal

STEPS = 100
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), 0)  # of the signal, after each step


class NoisedPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points of a circle with noise, the time step as a third number; the target is the noise."""

    def __init__(self, count: int):
        angles = torch.linspace(0, 2 * torch.pi, count)
        self.points = torch.stack([angles.cos(), angles.sin()], 1)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = torch.randint(STEPS, ())
        noise = torch.randn(2)
        noised = KEPT[at].sqrt() * self.points[index] + (1 - KEPT[at]).sqrt() * noise
        return torch.cat([noised, at[None] / STEPS]), noise


def train(job: shoal.Job) -> None:
    model = nn.Sequential(
        *(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    )
    step = job.step(model, F.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    for batch in job.batches(NoisedPoints(512), batch_size=64, epochs=4):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
