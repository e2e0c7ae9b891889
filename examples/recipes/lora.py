"""LoRA: the weights of a trained model stay, low-rank adapters beside its layers are trained.

Parameters without `requires_grad` are in no bucket and have no optimizer state.

shoal verify -n 2 -s ddp examples/recipes/lora.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal


class LoraLinear(nn.Module):
    """`layer(x) + scale · x·A·B`; B begins with zeros, so the model begins as it was."""

    def __init__(self, layer: nn.Linear, rank: int = 4, scale: float = 2.0):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.scale = scale
        self.a = nn.Parameter(torch.randn(layer.in_features, rank) / rank)
        self.b = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.layer(x) + self.scale * (x @ self.a @ self.b)
        return adapted


def train(job: shoal.Job) -> None:
    data = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=data)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(
        *(LoraLinear(nn.Linear(16, 64)), nn.ReLU(), LoraLinear(nn.Linear(64, 2), scale=1.0))
    )
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    for batch in job.batches(TensorDataset(x, y), batch_size=32, epochs=4):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
