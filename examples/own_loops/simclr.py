"""SimCLR: every sample is compared with all others of the global batch.

`job.gather` gives the rows of all workers in the order of the global batch. All workers compute
the same loss from them; its gradient comes back to the worker that has computed a row.

shoal run -n 2 -s ddp examples/own_loops/simclr.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

TEMPERATURE = 0.5


def train(job: shoal.Job) -> None:
    encoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    encoder, optimizer = job.setup(encoder, optimizer)
    for x, _ in job.batches(clusters(), batch_size=50, epochs=3):
        first = encoder(augmented(x, job))
        second = encoder(augmented(x, job))
        loss = nt_xent(job.gather(first), job.gather(second))
        job.log(loss=job.backward(loss))
        optimizer.step()
        optimizer.zero_grad()


def augmented(x: Tensor, job: shoal.Job) -> Tensor:
    """The noise of a sample is the same at any number of workers."""
    return x + 0.1 * job.rows(lambda n: torch.randn(n, 16))


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    """The mean over all samples: a view has to find the other view of its sample."""
    views = F.normalize(torch.cat([first, second]), dim=1)
    similarity = views @ views.T / TEMPERATURE
    similarity = similarity - 1e9 * torch.eye(len(views), device=views.device)
    partner = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(similarity, partner)


def clusters() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(8, 16, generator=generator)
    kind = torch.arange(240) % 8
    return TensorDataset(centers[kind] + 0.3 * torch.randn(240, 16, generator=generator), kind)


if __name__ == "__main__":
    shoal.run(train)
