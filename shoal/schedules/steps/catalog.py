"""The step of every term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.errors import BadInput
from shoal.schedules.steps.averages import gossip, hogwild, localsgd
from shoal.schedules.steps.servers import ps
from shoal.schedules.steps.step import StepSchedule
from shoal.schedules.steps.sums import ddp, mapreduce, single, zero
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.base import SyncTerm

Step = Callable[[Any, WorkerModel, int, int], StepSchedule]
STEPS: dict[str, Step] = {
    step.__name__: step for step in (single, ddp, zero, ps, gossip, hogwild, mapreduce, localsgd)
}


def step_of(term: SyncTerm, model: WorkerModel, replicas: int, rank: int) -> StepSchedule:
    """What a worker of this replica holds and exchanges in a step."""
    term = term.among(replicas)
    own = getattr(term, "step_of", None)
    if own is not None:
        step: StepSchedule = own(model, replicas, rank)
        return step
    names = (kind.__name__.lower() for kind in type(term).__mro__)
    found = next((STEPS[name] for name in names if name in STEPS), None)
    if found is None:
        raise BadInput(
            f"{term.name} does not say what its step holds and exchanges: give it a method "
            "step_of(self, model, replicas, rank) that returns a StepSchedule"
        )
    return found(term, model, replicas, rank)
