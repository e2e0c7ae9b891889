"""Workers as threads, one of which dies and comes back as another process would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.executor import Executor
from shoal.comm.executors.deferred import Deferred
from shoal.comm.group import Group
from shoal.comm.members.board import FileBoard, GroupMember
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.comm.members.meetings import Meetings
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.elastic import Killed, numbered_samples
from tests.models import mlp

BATCH = 12
PER_EPOCH = 5
EPOCHS = 4
STEPS = PER_EPOCH * EPOCHS
numbered = partial(numbered_samples, BATCH * PER_EPOCH)
Style = Literal["epochs", "in the loop"]


@dataclass
class Run:
    """A run of `size` workers; each one calls `live` once for each of its lives."""

    folder: Path
    strategy: str
    size: int
    style: Style
    trained: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # rank, step -> samples
    results: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # rank, generation
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    after_step: Callable[[int, int, Job], None] = lambda rank, generation, job: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder)

    def live(self, rank: int, generation: int = 0) -> Job:
        """To the end, or until `after_step` raises Killed."""
        run_dir = self.run_dir
        if generation:
            run_dir.note_start(rank, generation)
        job = self._job(rank, generation)
        self.results[rank, generation] = []
        try:
            self._train(job, generation)
        except Killed:
            _die(job)
            run_dir.note_exit(rank, -9)
            return job
        except BaseException:  # the others do not wait for it
            _die(job)
            run_dir.note_exit(rank, 1)
            raise
        job.close()
        self.reports[rank] = job.report()
        run_dir.note_exit(rank, 0)
        return job

    def _job(self, rank: int, generation: int) -> Job:
        run_dir = self.run_dir
        board = FileBoard(run_dir.meetings(1), run_dir)
        meetings = Meetings(board, GroupMember(rank, generation), self.size, 60.0)
        sums = ElasticSum(run_dir.meetings(1), rank, meetings.is_missing, 60.0)
        config = replace(
            RunConfig.from_environment(), incarnation=generation, restarts=1, run_dir=run_dir
        )

        def make() -> Executor:
            raise AssertionError("no collective of all ranks")

        start = run_dir.start_folder(1)
        group = Group(Deferred(start, rank, self.size, run_dir.has_exited, make, keeps=True))
        services = RunServices(elastic_sum=sums, meetings=meetings, config=config)
        return Job(
            parse(self.strategy), group, device=torch.device("cpu"), seed=3, services=services
        )

    def _train(self, job: Job, generation: int) -> None:
        sgd = partial(torch.optim.SGD, lr=0.05)
        model = mlp(job.rank + 10 * generation)  # all start from what the first one has
        step = job.step(model, F.cross_entropy, optimizer=sgd)
        data = numbered()
        if self.style == "epochs":
            for _ in range(EPOCHS):
                self._loop(job, step, job.batches(data, BATCH), generation)
                self._evaluate(job, generation)
        else:
            self._loop(job, step, job.batches(data, BATCH, epochs=EPOCHS), generation)
        job.save(self.folder / "saved")

    def _loop(self, job: Job, step: Any, batches: Any, generation: int) -> None:
        for batch in batches:
            before = job.steps
            step(batch)
            if not step.sync.is_skipped and job.steps - before == 1:
                with self.lock:
                    assert (job.rank, before) not in self.trained, "a batch was trained twice"
                    self.trained[job.rank, before] = batch[0][:, 0].clone()
            self.after_step(job.rank, generation, job)
            if self.style == "in the loop" and job.steps % PER_EPOCH == 0:
                self._evaluate(job, generation)

    def _evaluate(self, job: Job, generation: int) -> None:
        mean = job.evaluate(lambda outputs, targets: targets.double().mean(), numbered())
        self.results[job.rank, generation].append(mean)


def _die(job: Job) -> None:
    """What the kernel does with a process that is killed: its connections break."""
    for step in job._steps:
        sync: Any = step.sync
        if hasattr(sync, "client"):
            sync.client.close()
        else:
            sync.ranks.release()
