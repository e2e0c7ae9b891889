"""A job alone or on a group, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import mlp, samples

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)


def job_of(group: Group | None = None, seed: int = 3, **services: Any) -> Job:
    given = RunServices(**{name: value for name, value in services.items() if value is not None})
    return Job(parse("ddp"), group or solo_group(), device=CPU, seed=seed, services=given)


def losses(
    loops: Callable[[Job], Iterable[Any]],
    path: Path,
    save_at: int | None,
    load: bool = False,
    group: Group | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> list[float]:
    """Train on the batches of `loops(job)`; save after a step, or continue from there."""
    job = job_of(group)
    step = job.step(model or mlp(), F.cross_entropy, **{"optimizer": SGD, **options})
    if load:
        job.load(path)
    found = []
    for batch in loops(job):
        found.append(step(batch).item())
        if job.steps == save_at:
            job.save(path)
    return found


Look = Callable[[Job, Any, list[float]], Any]  # at a job, its step and the losses


def after_training(
    world: World,
    size: int,
    strategy: str,
    look: Look = lambda job, step, losses: losses,
    *,
    make: Callable[[], nn.Module] = mlp,
    data: Any = None,
    batch_size: int | None = 16,
    epochs: int = 1,
    steps: int | None = None,
    load: Path | None = None,
    shuffle: bool = True,
    services: Sequence[RunServices | None] = (None,) * 64,
    **options: Any,
) -> list[Any]:
    """What `look` returns on each worker when it has trained."""
    models = [make() for _ in range(size)]
    data = samples(48) if data is None else data
    options = {"optimizer": SGD, **options}

    def body(group: Group) -> Any:
        job = Job(parse(strategy), group, device=CPU, seed=3, services=services[group.rank])
        try:
            step = job.step(models[group.rank], F.cross_entropy, **options)
            if load is not None:
                job.load(load)
            batches = job.batches(data, batch_size, epochs=epochs, steps=steps, shuffle=shuffle)
            return look(job, step, [float(step(batch)) for batch in batches])
        finally:
            job.close()

    return world(size, body)


def weights_of(job: Job, step: Step, losses: list[float]) -> Tensor:
    return step.flat.data.clone()


def model_of(job: Job, step: Step, losses: list[float]) -> Any:
    return step.model


def report_of(job: Job, step: Step, losses: list[float]) -> dict[str, Any]:
    return step.sync.report()


class Shown:
    """A progress that keeps what it is given."""

    def __init__(self, due: bool = True):
        self.is_due = due
        self.records = list[Mapping[str, Any]]()

    def due(self, step: int, total: int | None) -> bool:
        return self.is_due

    def show(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        return None
