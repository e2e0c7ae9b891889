"""Workers time the passes of a model on their rows of its first batch, and train nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.observe.workload_trace import study_workload
from shoal.runtime.config import RunConfig
from shoal.strategy.strategy import as_strategy
from shoal.train.job import Job
from shoal.worker.auto import measure_profile
from tests.conftest import World
from tests.train.test_job import SGD, mlp, samples

CPU = torch.device("cpu")


def train(job: Job) -> None:
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(12), batch_size=12, epochs=3):
        step(batch)


def test_every_worker_has_its_rows(world: World) -> None:
    def run(workers: int, config: RunConfig) -> None:
        def body(group: Group) -> None:
            strategy = as_strategy(config.strategy or "single")
            make: Any = partial(_job, strategy, group)
            study_workload(config.workload_trace, train, make)

        world(workers, body)

    for workers in (1, 3):
        found = measure_profile(run, RunConfig(), workers, seconds=1e-6)
        assert (found.workers, found.rows) == (workers, 12 // workers)
        assert min(found.forward_s, found.backward_s, found.update_s) > 0
        done, moments = zip(*found.ready, strict=True) if workers > 1 else ((1.0,), (0.5,))
        assert done[-1] == 1.0 and 0 < moments[-1] < 1  # one bucket, before backward is over
        assert set(found.quartiles) == {"forward_s", "backward_s", "update_s"}


def _job(strategy: Any, group: Group, kind: type[Job]) -> Job:
    return kind(strategy, group, device=CPU)
