"""Mixup and CutMix: the partner of a sample and how they are mixed are drawn in the dataset.

Draws of `__getitem__` follow from the seed, the epoch and the index of the sample, so a sample is
mixed alike on any number of workers. Mixing the rows of a batch in the loop would mix those of one
worker only.

shoal verify -n 2 -s ddp examples/recipes/mixup.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal

CLASSES, SIZE = 4, 8


class MixedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with labels that are probabilities; half of them by mixup, half by CutMix."""

    def __init__(self, images: Tensor, labels: Tensor, alpha: float = 0.4):
        self.images = images
        self.labels = F.one_hot(labels, CLASSES).float()
        self.strength = torch.distributions.Beta(alpha, alpha)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        other = int(torch.randint(len(self), ()))
        kept = self.strength.sample()
        image, partner = self.images[index], self.images[other]
        if torch.rand(()) < 0.5:
            image = kept * image + (1 - kept) * partner
        else:
            side = int(SIZE * (1 - kept).sqrt())
            top, left = torch.randint(SIZE - side + 1, (2,)).tolist()
            image = image.clone()
            rows, columns = slice(top, top + side), slice(left, left + side)
            image[:, rows, columns] = partner[:, rows, columns]
            kept = 1 - torch.tensor(side * side / SIZE**2)
        return image, kept * self.labels[index] + (1 - kept) * self.labels[other]


def train(job: shoal.Job) -> None:
    data = torch.Generator().manual_seed(0)
    images = torch.randn(256, 1, SIZE, SIZE, generator=data)
    labels = torch.randint(CLASSES, (256,), generator=data)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * SIZE**2, CLASSES)
    )
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    for batch in job.batches(MixedImages(images, labels), batch_size=32, epochs=4):
        job.log(loss=step(batch))


if __name__ == "__main__":
    shoal.run(train)
