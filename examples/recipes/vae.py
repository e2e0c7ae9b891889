"""A variational autoencoder: the numbers that its forward needs come with the samples.

`torch.randn_like(mean)` in a forward draws for the rows that one worker has, so the result depends
on how a batch is cut. Drawn in `__getitem__` the noise follows from the seed, the epoch and the
index of the sample, and is equal at any number of workers. Dropout masks and the like stay in the
model: only `shoal run --exact` makes them equal.

shoal verify -n 2 -s ddp examples/recipes/vae.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal

LATENT = 2


class Curves(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Sine curves with the noise for their latent variables; the target is the curve itself."""

    def __init__(self, count: int):
        phases = torch.linspace(0, 2 * torch.pi, count)[:, None]
        self.curves = torch.sin(phases + torch.linspace(0, 2 * torch.pi, 16))

    def __len__(self) -> int:
        return len(self.curves)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self.curves[index], torch.randn(LATENT)), self.curves[index]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, curve: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(curve).chunk(2, dim=-1)
        latent = mean + torch.exp(0.5 * log_variance) * noise
        return self.decoder(latent), mean, log_variance


def elbo(outputs: tuple[Tensor, Tensor, Tensor], curve: Tensor) -> Tensor:
    decoded, mean, log_variance = outputs
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
    return F.mse_loss(decoded, curve) + 0.01 * divergence


def train(job: shoal.Job) -> None:
    step = job.step(Autoencoder(), elbo, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    for batch in job.batches(Curves(512), batch_size=64, epochs=4):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
