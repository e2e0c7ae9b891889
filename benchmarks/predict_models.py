"""The models that `python -m benchmarks predict` trains and traces, on data of their own.

python -m benchmarks.predict_models --model gpt
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shoal
from benchmarks.step import WORKLOADS

BATCHES = {"gpt": 16, "gpt-medium": 16, "gpt-large": 16, "mlp": 64, "mlp-small": 64}
EPOCHS = 1000  # a run is stopped after its steps
_DATASET = 8  # batches


def train(job: shoal.Job, model_name: str, batch_size: int) -> None:
    model, loss, inputs, targets = WORKLOADS[model_name](batch_size * _DATASET)
    step = job.step(model, loss, optimizer=OPTIMIZERS[model_name])
    dataset = TensorDataset(inputs, targets)
    for batch in job.batches(dataset, batch_size=batch_size, epochs=EPOCHS):
        step(batch)


_ADAMW = partial(torch.optim.AdamW, lr=1e-4)
_MOMENTUM = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    name: _ADAMW if name.startswith("gpt") else _MOMENTUM for name in BATCHES
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=BATCHES, required=True)
    parser.add_argument("--batch-size", type=int)
    args = parser.parse_args()
    batch_size = args.batch_size or BATCHES[args.model]
    shoal.run(lambda job: train(job, args.model, batch_size))


if __name__ == "__main__":
    main()
