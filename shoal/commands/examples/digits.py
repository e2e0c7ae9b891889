"""Train a small convolutional network on handwritten digits.

    python -m shoal.commands.examples.digits                     one worker
    shoal train -n 2 -s ddp digits                      two workers
    shoal run -n 2 shoal/commands/examples/digits.py --epochs 3 --exact

The data is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0: 1,797 images
of 8 x 8 pixels with values from 0 to 16. See data/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.commands.examples.options import OptionParser, Options, batches

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
NUM_TRAIN = 1_500


def train(job: shoal.Job, options: Options | None = None) -> None:
    options = options or read_options()
    train_set, test_set = load_digits()
    optimizer = partial(sgd, lr=options.lr)
    step = job.step(DigitsNet(), F.cross_entropy, optimizer=optimizer, **options.of_step)
    for batch in batches(job, train_set, options, "digits"):
        job.log(loss=step(batch))
    results = test(job, test_set)
    job.print(f"test accuracy {results['accuracy']:.2%}, loss {results['loss']:.4f}")


def evaluate(job: shoal.Job, checkpoint: str, about: dict[str, Any]) -> dict[str, float]:
    """Test a checkpoint of this script."""
    job.step(DigitsNet(), F.cross_entropy, optimizer=partial(sgd, lr=about["options"]["lr"]))
    job.load(checkpoint)
    return test(job, load_digits()[1])


def test(job: shoal.Job, test_set: TensorDataset) -> dict[str, float]:
    results: dict[str, float] = job.evaluate(metrics, test_set, batch_size=256)
    return results


def metrics(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    is_right = logits.argmax(dim=1) == targets
    return {"accuracy": is_right.float().mean(), "loss": F.cross_entropy(logits, targets)}


class DigitsNet(nn.Sequential):
    """(batch, 1, 8, 8) pixels to (batch, 10) logits; 22,650 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (batch, 16, 4, 4)
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (batch, 32, 2, 2)
            nn.Flatten(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


sgd = partial(torch.optim.SGD, momentum=0.9)


@cache  # virtual workers share it
def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,500 images to train on and 297 to test on; the same ones every time."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.int64)
    # numpy keeps the stream of RandomState across versions; newer generators may change theirs
    order = np.random.RandomState(0).permutation(len(table))
    rows = torch.from_numpy(table[order])
    images = rows[:, :64].float().div(16).view(-1, 1, 8, 8)
    digits = rows[:, 64]
    return (
        TensorDataset(images[:NUM_TRAIN], digits[:NUM_TRAIN]),
        TensorDataset(images[NUM_TRAIN:], digits[NUM_TRAIN:]),
    )


def read_options(argv: Sequence[str] | None = None) -> Options:
    about = "Train a small convolutional network on handwritten digits."
    return OptionParser("digits", about, epochs=12, batch_size=64, lr=0.05).read(argv)


if __name__ == "__main__":
    shoal.run(train)
