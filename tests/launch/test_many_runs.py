"""A process may call shoal.run again and again: nothing of an earlier run stays."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.train.job import Job
from tests import scripts
from tests.launch.helpers import ROOT
from tests.products import few_or_all

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
WIDTH = 16


class Runs:
    """Trains a new model each time, and knows which weights are still there."""

    def __init__(self) -> None:
        self._weights: list[weakref.ref[nn.Parameter]] = []

    def train(self, job: Job) -> None:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*blocks)
        self._weights += map(weakref.ref, model.parameters())
        step = job.step(model, nn.functional.mse_loss, optimizer=SGD, microbatches=2)
        data = TensorDataset(torch.rand(8, WIDTH), torch.rand(8, WIDTH))
        for batch in job.batches(data, 4):
            step(batch)
        job.evaluate(nn.functional.mse_loss, data, 4)

    def alive(self) -> int:
        gc.collect()
        return sum(weight() is not None for weight in self._weights)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("strategy", few_or_all(["ddp"], ["ddp", "zero", "gossip", "hogwild"]))
def test_runs_in_one_process_leave_no_weights_and_no_descriptors(strategy: str) -> None:
    runs = Runs()
    shoal.run(runs.train, strategy=strategy)
    gc.collect()
    before = open_files()
    for _ in range(3):
        shoal.run(runs.train, strategy=strategy)
    assert runs.alive() == 0
    assert open_files() == before


SCRIPT = """
import sys, shoal
from tests.launch.test_many_runs import Runs, open_files

runs = Runs()
for number in range(int(sys.argv[1])):
    shoal.run(runs.train)
    if number == 1:
        before = open_files()
assert open_files() <= before, (before, open_files())
assert runs.alive() == 0
"""


FIFTY = [
    pytest.param(strategy, 50, marks=[pytest.mark.whole, pytest.mark.timeout(600)])
    for strategy in ("ddp", "ps", "zero(3)", "gossip", "hogwild", "pp(2)")
]


@pytest.mark.parametrize(("strategy", "count"), [("ps", 4), *FIFTY])
def test_runs_on_two_workers_leave_no_weights_and_no_descriptors(
    tmp_path: Path, strategy: str, count: int
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "-s", strategy, "script.py", str(count)]
    done = scripts.shoal(*words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]
