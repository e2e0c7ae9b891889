"""`shoal memory` on a script that writes the loop itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from shoal.comm.executors.solo import solo_group
from shoal.observe.memory_estimate import estimate_memory
from shoal.observe.model_sizes import loop_sizes, other_bytes
from shoal.runtime.config import MemoryEstimateConfig
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.jobs import CPU
from tests.models import mlp, samples


def test_models_and_their_optimizers_are_counted() -> None:
    model = mlp()
    target = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (sizes,) = loop_sizes([model, target], [optimizer])
    trained = sum(p.nbytes for p in model.parameters())
    assert sum(sizes.state.values()) == trained
    assert other_bytes([model, target], [sizes]) == 4 * (16 + 4)


def test_a_loop_of_the_scripts_own_is_estimated(tmp_path: Path) -> None:
    def train(job: Job) -> None:
        model = mlp()
        _, optimizer = job.setup(model, torch.optim.Adam(model.parameters()))
        for _ in job.batches(samples(20), 10):
            optimizer.step()
        raise AssertionError("the estimate ends before the first batch")

    def make(kind: type[Job]) -> Job:
        return kind(parse("single"), solo_group(), device=CPU)

    assert estimate_memory(MemoryEstimateConfig(tmp_path, "zero(2)", 2), train, make)
    [found] = json.loads((tmp_path / "estimate.json").read_text())
    whole = sum(p.nbytes for p in mlp().parameters())
    assert [worker["activations"] for worker in found["workers"]] == [None, None]
    assert all(worker["parameters"] >= whole for worker in found["workers"])
    assert sum(worker["optimizer"] for worker in found["workers"]) >= 2 * whole
