"""A worker of `shoal compare`: one process that runs the script's training function many times.

    python -m shoal.commands.compare_worker PLAN SCRIPT [ARGS]

Starting Python and torch takes longer than a short run, so the processes are started once. The
script runs up to its call of `shoal.run`, and there its training function is run under one
strategy after the other. A run that the strategy or the script refuses is noted, and the next
one follows; any other error ends the process, and whoever started it goes on without that run.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.errors import BadInput
from shoal.launch.environment import Placement, detect
from shoal.launch.run import Train, Worker, run, taken_by
from shoal.launch.run_dir import leave_report
from shoal.launch.worker import open_progress
from shoal.observe.comparison import BEGUN, ComparedRun
from shoal.strategy.strategy import as_strategy
from shoal.train.job import Job
from shoal.train.step import Step


class Contestant(Worker):
    """One of many runs of a process: leaves its report in a folder of its own."""

    def __init__(
        self, entry: ComparedRun, placement: Placement, steps: int | None, models: set[Any]
    ):
        seed = int(os.environ.get("SHOAL_SEED") or 0)
        strategy = as_strategy(entry.strategy)
        super().__init__(strategy, placement, seed, os.environ.get("SHOAL_DEVICE"))
        self.number = entry.number
        self.folder = Path(entry.folder)
        self.steps = steps
        self.losses: list[Tensor] = []
        self._models = models

    def prepare(self, job: Job) -> None:
        job.dry = True
        job.on_build.append(self._check_model)
        job.on_step.append(lambda step, loss: self.losses.append(loss.detach()))
        if self.steps is not None:
            job.stop_after(self.steps)

    def leave(self, job: Job) -> None:
        losses = [float(loss) for loss in self.losses]
        leave_report(self.folder, self.rank, {**job.report(), "losses": losses})

    def note_end(self) -> None:
        return None

    def give_up(self, error: Exception) -> None:
        if not isinstance(error, BadInput):
            super().give_up(error)

    def _check_model(self, step: Step) -> None:
        """A model that was trained in an earlier run would make this one look better."""
        if step.model in self._models:
            raise BadInput(
                "the script makes its model outside of the training function, so that it is "
                "trained already when the next strategy begins: make it inside, or add --apart"
            )
        self._models.add(step.model)


def compare(train: Train, plan: dict[str, Any]) -> None:
    placement = detect(os.environ)
    assert placement is not None
    tell = open_progress(os.environ)
    models: set[nn.Module] = set()
    own_threads = torch.get_num_threads()
    for number, fields in enumerate(plan["entries"]):
        entry = ComparedRun(**fields)
        if placement.rank >= entry.workers:
            continue
        if placement.rank == 0:
            (Path(entry.folder) / BEGUN).touch()
            if tell is not None:
                tell({"entry": entry.number})
        os.environ["SHOAL_TRACE_DIR"] = entry.folder
        torch.set_num_threads(plan["cores"] if entry.workers == 1 else own_threads)
        place = replace(placement, size=entry.workers, local_size=entry.workers)
        if entry.workers < placement.size:  # the others are not at this meeting
            place = replace(place, rendezvous=f"{placement.rendezvous}-{number}")
        try:
            Contestant(entry, place, plan["steps"], models).run(train)
        except BadInput as error:
            leave_report(entry.folder, placement.rank, {"refused": str(error)})


def main(argv: list[str]) -> None:
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    target = argv[1]
    sys.argv = argv[1:]
    shoal.__dict__["run"] = run  # the import above has put the module under the name
    with taken_by(lambda train: _once(train, plan)):
        if target.startswith("shoal.examples."):
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    raise BadInput("the script has ended without a call of shoal.run(train)")


def _once(train: Train, plan: dict[str, Any]) -> None:
    compare(train, plan)
    sys.exit(0)  # what follows in the script is not part of the comparison


if __name__ == "__main__":
    main(sys.argv[1:])
