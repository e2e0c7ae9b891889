"""A job alone or on a group, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.run_services import RunServices

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)


def job_of(group: Group | None = None, seed: int = 3, **services: Any) -> Job:
    given = RunServices(**{name: value for name, value in services.items() if value is not None})
    return Job(parse("ddp"), group or solo_group(), device=CPU, seed=seed, services=given)


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
