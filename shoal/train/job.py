"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from shoal.comm.elastic import ElasticSum
from shoal.comm.elastic_group import ElasticGroup
from shoal.comm.group import Group
from shoal.comm.meetings import Meeting, Meetings
from shoal.comm.mesh import Mesh
from shoal.data.batch import AnyBatch
from shoal.data.batch_options import BatchOptions
from shoal.data.sampling import BatchSplit, Collate, mix
from shoal.data.stream import BatchStream
from shoal.errors import BadInput, NotBuilt
from shoal.observe.loss_watch import LossWatch
from shoal.observe.progress import Progress, SilentProgress
from shoal.observe.throughput import Throughput
from shoal.observe.trace import LOAD, OFF, Tracer, traced_items
from shoal.replica.loss import LossFunction
from shoal.replica.microbatch import Precision
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults
from shoal.runtime.preemption import EXIT_STATUS, Preemption
from shoal.runtime.step_count import StepCount
from shoal.strategy.strategy import Strategy
from shoal.sync.base import Comeback
from shoal.sync.lr_schedule import SchedulerFactory
from shoal.sync.optimizer_step import LearningRate, OptimizerFactory
from shoal.train import checkpoint
from shoal.train.agreement import Agreement
from shoal.train.automatic_checkpoint import AutomaticCheckpoint, FindCheckpoint
from shoal.train.build_step import StepContext, build_step
from shoal.train.elastic_training import ElasticTraining
from shoal.train.ema import Ema, fit_averages
from shoal.train.evaluate import Evaluation, Metric
from shoal.train.loop_methods import LoopMethods
from shoal.train.map_reduce import map_reduce_over
from shoal.train.options import Count, StepFunctions, StepOptions
from shoal.train.other_optimizers import OtherOptimizers
from shoal.train.own_loop import OwnLoop
from shoal.train.restore import FittingState, fit, fit_positions
from shoal.train.server_checkpoint import (
    check_unused,
    is_server_checkpoint,
    read_servers,
    worker_part,
)
from shoal.train.state import snapshot
from shoal.train.step import AfterStep, Step
from shoal.train.untrained_models import fit_untrained, gather_untrained, load_untrained

T = TypeVar("T")


@dataclass(frozen=True)
class RunServices:
    """What surrounds a job: progress, tracing, injected faults, and sums over survivors.

    `elastic_sum` and `step_count` are None if the loss of a rank ends the run, `meetings` if lost
    ranks do not come back. A job that no launcher made reads its configuration from the
    environment.
    """

    progress: Progress = field(default_factory=SilentProgress)
    tracer: Tracer = OFF
    faults: Faults | None = None
    elastic_sum: ElasticSum | None = None
    meetings: Meetings | None = None
    preemption: Preemption | None = None
    step_count: StepCount | None = None
    config: RunConfig = field(default_factory=RunConfig.from_environment)


class Job(LoopMethods):
    """One rank's view of a training run.

    Every rank calls the same methods in the same order. `steps` counts training steps, including
    those of the run that a checkpoint continues.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        *,
        device: torch.device,
        seed: int = 0,
        services: RunServices | None = None,
    ):
        strategy.require_built()
        layout = strategy.layout(group.size)
        self.strategy = strategy
        self._group = group
        self.device = device
        self.seed = seed
        self.rank = group.rank
        self.size = group.size
        self.mesh = Mesh.of(group, layout)
        if isinstance(group, ElasticGroup):
            self.rank = group.membership.me.worker
            self.size = group.membership.size
            self.mesh = replace(self.mesh, dp=group, data=group)
        self.replica = self.mesh.dp.rank
        self.replicas = layout.replicas
        self.generator = torch.Generator().manual_seed(mix(seed, 4, self.mesh.data.rank))
        self.steps = 0
        self.before_build: list[Callable[[nn.Module], None]] = []
        self.on_build: list[Callable[[Step], None]] = []
        self.on_step: list[AfterStep] = []
        self.dry = False  # a trial run: nothing is saved
        self._steps: list[Step] = []
        self._emas: list[Ema] = []
        self._services = services or RunServices()
        self._printed: set[str] = set()
        self._loss_watch = LossWatch(self._say_once)
        self._logged_step = 0
        self._is_log_shown = True
        self._logged: dict[str, float | Tensor] = {}
        self._evaluated: dict[str, float] = {}
        self._stream = BatchStream(
            self.mesh.data, device, seed, self._steps_done, self._before_batch
        )
        self._stream.must_stop = self._must_stop
        self._loaded = 0  # checkpoints
        self._has_continued = False
        self._saved: tuple[Path, dict[str, Any]] | None = None  # where the script saved last
        self._automatic = AutomaticCheckpoint(
            self._services.config.checkpoint, lambda: not self.dry and bool(self._steps)
        )
        self.is_preempted = False
        self._stream.kind = strategy.sync_for(self.replicas).batches
        self._throughput = Throughput(group.size // self.mesh.data.size)
        self._loop = OwnLoop(self.mesh, mix(seed, 5), self._step_context, self._end_loop_step)
        self._others: OtherOptimizers | None = None  # watched for from the first model or batch on
        self._agreement = Agreement(group, device, self._services.elastic_sum)
        self._elastic: ElasticTraining | None = None
        if isinstance(group, ElasticGroup):
            self._elastic = ElasticTraining(group, self._stream, self._steps, self)
            self._stream.same.compares = False  # one who joins later has not been there

    def step(
        self,
        model: nn.Module,
        loss: LossFunction | None = None,
        *,
        optimizer: OptimizerFactory,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Precision = "fp32",
        lr: LearningRate | None = None,
        scheduler: SchedulerFactory | None = None,
        exact: bool = False,
        microbatches: int = 8,
        count: Count | None = None,
        batchnorm: Literal["global", "local"] = "global",
        example: Any = None,
    ) -> Step:
        """Make the function that trains `model` on one batch and returns the batch's loss.

        `loss(outputs, targets)` is a mean over samples, or over what `count(batch)` counts. It
        may return a tuple or dict of numbers: the first, or "loss", is trained, and all of them
        come back, averaged. Without it the model returns its own loss.
        `optimizer` is called with (name, parameter) pairs. `clip_norm` bounds the norm of the
        whole gradient. `accumulate` computes a batch in that many micro-batches. `lr(step)` is
        the learning rate of a step; or `scheduler(optimizer)` makes one of torch's schedulers,
        which is stepped after every step. `exact` gives the same bits at any number of workers that
        divides `microbatches`, under ddp at any number up to it. `batchnorm="local"` computes
        statistics per replica. `example` are inputs of a batch, for `pp(n, balance="measured")`.
        """
        options = StepOptions(clip_norm, accumulate, precision, exact, microbatches, batchnorm)
        functions = StepFunctions(loss, optimizer, lr, count, scheduler)
        if self._elastic is not None and self._elastic.group.has_formed:
            raise BadInput("in an elastic run job.step comes before the first batch")
        with self._starting():
            step = build_step(model, functions, options, self._step_context(), example)
        self._add_step(step)
        return step

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        steps: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
        loaders: int = 0,
        sampler: Iterable[Any] | None = None,
    ) -> Iterator[Any]:
        """This replica's rows of every global batch.

        `data` is a map-style dataset of samples or an IterableDataset, with `batch_size` samples
        in a global batch; or any iterable of global batches, such as a DataLoader, without
        `batch_size`. `sampler` yields indices, as for one device, in place of `shuffle`. It ends
        after `epochs`, or when the job has done `steps` steps. `loaders` processes fetch samples in
        the background. After `job.load` it skips the batches that the saved run has seen.
        """
        self._continue()
        self._come_back()
        options = BatchOptions(
            batch_size, epochs, steps, shuffle, drop_last, collate, loaders, sampler
        )
        batches = self._stream.batches(data, self._split(), options)
        return self._loop.rows_of(traced_items(self._services.tracer, LOAD, "steps", batches))

    def stop_after(self, steps: int) -> None:
        """End job.batches after so many steps, if the script does not end it before."""
        self._stream.max_steps = steps

    def log(self, **metrics: float | Tensor) -> None:
        """Show progress: rank 0 shows the metrics now and then, other ranks do nothing."""
        self._logged = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }
        self._logged_step = self.steps + self._steps_under_way()
        self._is_log_shown = False
        if self._services.progress.due(self._logged_step, self._stream.total_steps):
            self._show_log()

    def print(self, *words: Any) -> None:
        """Print once, from rank 0, or from the lowest surviving rank."""
        if self._is_first:
            print(*words, flush=True)

    def evaluate(
        self,
        metric: Metric,
        data: Any,
        batch_size: int | None = None,
        step: Step | None = None,
        collate: Collate | None = None,
    ) -> Any:
        """The mean of `metric(outputs, targets)` over all samples of `data`, on every rank.

        `metric` returns a number that is a mean over the samples it was given, or a dict of
        such numbers; the result has the same form. The model is that of `step` (default: the
        latest one), in evaluation mode.
        """
        services = self._services
        evaluation = Evaluation(
            metric, step or self._latest_step(), services.elastic_sum, services.tracer, collate
        )
        batch_size = batch_size or self._stream.batch_size
        self._evaluated = self._meet(lambda: evaluation.means(data, batch_size))
        is_number = list(self._evaluated) == [""]
        return self._evaluated[""] if is_number else dict(self._evaluated)

    def map_reduce(
        self,
        map_fn: Callable[[Any], Any],
        items: Iterable[Any],
        reduce_fn: Callable[[Any, Any], Any],
    ) -> Any:
        """See `shoal.map_reduce`: on the workers of this job."""
        self._refuse_elastic("job.map_reduce")
        return map_reduce_over(self._group, map_fn, items, reduce_fn)

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Save the whole model, the optimizer and the position in the data under `path`.

        Call it on all ranks; rank 0 writes, or the lowest surviving rank. All ranks return when
        the checkpoint is complete; if it cannot be saved, all of them raise. `about` is kept in
        the manifest; it has to be JSON.
        """
        if self.dry:
            return

        def write() -> None:
            self._agreement.run(lambda: (None, self._write(Path(path), about or {})))

        self._meet(write)
        self._saved = (Path(path), about or {})

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, whatever strategy and number of workers saved it.

        Call it on all ranks, after `job.step`, before `job.batches`. All ranks load the same
        checkpoint, or raise and load nothing. Returns `about` of the checkpoint.
        """
        if not self._steps:
            raise BadInput("job.load comes after job.step: there is no model yet to load into")
        before = self._loaded
        document = self._meet(lambda: self._load(Path(path)))
        if self._loaded == before:  # the others have loaded it, before this worker came back
            self._stream.resume(document["batches"], document["position"], document["steps"])
        about = document["about"]
        return about if isinstance(about, dict) else {}

    def _continue(self) -> None:
        """Before the first batch: go on from the latest checkpoint, if asked to."""
        asked = self._services.config.server_checkpoint
        own = self._automatic.folder
        if self._has_continued or not self._steps:
            return
        self._has_continued = True
        if own is not None:
            self._resume(own, self._automatic.read)
        self._automatic.saved_at = self.steps
        if asked.folder is None:
            return
        saves = self._steps[-1].sync.saves
        if not asked.resume:
            if saves is not None:
                check_unused(asked.folder, saves.model)
            return
        folder = asked.folder
        self._resume(folder, lambda: read_servers(folder, self._say_once))

    def _resume(self, folder: Path, find: FindCheckpoint) -> None:
        before = self._loaded
        document = self._meet(lambda: self._load_latest(folder, find))
        if document and self._loaded == before:
            self._stream.resume(document["batches"], document["position"], document["steps"])

    def _load_latest(self, folder: Path, find: FindCheckpoint) -> dict[str, Any]:
        def read() -> tuple[checkpoint.Checkpoint | None, str]:
            saved = find()
            return saved, "none" if saved is None else saved.digest

        saved = self._agreement.load(folder, read)
        if saved is None or saved.document["steps"] <= self.steps:
            there = "no" if saved is None else "no later"
            begin = f"training begins with step {self.steps + 1}"
            self._say_once(f"{there} checkpoint is in {folder}: {begin}")
            return {}
        document = self._install(saved, fit(self._steps, saved, folder), folder)
        self._say_once(f"resuming from {folder} after {self.steps} steps")
        return document

    def _load(self, path: Path) -> dict[str, Any]:
        """What a worker that comes back has to know of the checkpoint."""
        saved, states = self._agreement.load(path, lambda: self._read(path))
        return self._install(saved, states, path)

    def _install(
        self, saved: checkpoint.Checkpoint, states: list[FittingState], path: Path
    ) -> dict[str, Any]:
        averages = fit_averages(self._emas, saved, path)
        untrained = fit_untrained(self._loop.untrained, saved, path)
        positions = fit_positions(saved, path)
        for state in states:
            state.load()
        for ema, tensors in zip(self._emas, averages, strict=False):
            ema.load(tensors)
        load_untrained(self._loop.untrained, untrained)
        self._tell_bare([name for state in states for name in state.bare])
        self._loop.take_settings()
        self.steps = saved.document["steps"]
        self._count_steps()
        self._stream.restore(saved.document["batches"], positions)
        self._throughput.restart()
        if self._services.meetings is not None:
            self._agreement.run(lambda: (None, ""))  # none trains before the last one has loaded
        self._loaded += 1
        names = ("about", "position", "batches", "steps")
        return {name: saved.document.get(name, {}) for name in names}

    def close(self) -> None:
        """End the job: print the summary, stop threads, close connections."""
        self._loop.end_batches()
        if self._elastic is not None:
            self._elastic.close()
        self._loss_watch.look()
        if not self._is_log_shown:  # the latest, where the number of steps was not known
            self._show_log()
        if self._others is not None:
            self._others.end()
        if self._stream.has_nothing_left:
            self._say_once(f"nothing is left to train: all {self.steps} steps were done before")
        for step in self._steps:
            step.sync.close()
            for sentence in step.sync.summary():
                self._say_once(sentence)

    def report(self) -> dict[str, Any]:
        """What happened on this rank, for machines: JSON-able.

        `logged` is the latest argument of job.log, `evaluated` the latest result of job.evaluate,
        under "" where the metric is one number.
        """
        return {
            "rank": self.rank,
            "steps": self.steps,
            "logged": {name: float(value) for name, value in self._logged.items()},
            "evaluated": self._evaluated,
            **self._throughput.report(self._services.tracer.origin_ns),
            "sync": [step.sync.report() for step in self._steps],
        }

    # ------------------------------------------------------------------ internals

    @property
    def group(self) -> Group:
        """All ranks, for a script that exchanges tensors itself."""
        self._refuse_elastic("job.group")
        self._note_exchange()
        return self._group

    def _refuse_elastic(self, name: str) -> None:
        """A worker that joins later would not be in what all workers do together here."""
        if self._elastic is not None:
            raise NotBuilt(
                f"{name} is not built for elastic runs, in which workers leave and join between "
                "two steps: leave out elastic"
            )

    def _note_exchange(self) -> None:
        if self._others is not None:
            self._others.communicates = True

    def _watch_optimizers(self) -> None:
        if self._others is None and self.size > 1:
            self._others = OtherOptimizers(
                self._steps,
                lambda: [
                    o for owner in self._loop.optimizers for o in (owner.optimizer, *owner.of_parts)
                ],
            )

    def _add_step(self, step: Step) -> None:
        self._watch_optimizers()
        self._check_saves(step)
        step.after = [self._after_step, *self.on_step]
        if self._elastic is not None:
            if step.is_own_loop or step.embeddings:
                what = "job.setup" if step.is_own_loop else "shoal.Embedding"
                raise NotBuilt(f"{what} is not built for elastic runs: leave out elastic")
            step.around = self._elastic.train
        self._steps.append(step)
        self._stream.same.compares &= step.sync.synchronous
        for callback in self.on_build:
            callback(step)

    def _check_saves(self, step: Step) -> None:
        """Periodic checkpoints of servers hold one model, which the servers train."""
        folder = self._services.config.server_checkpoint.folder
        if folder is None or self.dry:
            return
        if step.sync.saves is None:
            raise BadInput(f"--server-checkpoint is for ps, and this run trains by {step.term}")
        if self._steps or self._emas:
            raise BadInput(
                "--server-checkpoint is for scripts that train one model with one optimizer and "
                "no averages: use job.save"
            )

    def _show_log(self) -> None:
        """Show what was logged last."""
        self._is_log_shown = True
        values = {name: float(value) for name, value in self._logged.items()}
        for name, value in values.items():
            if not math.isfinite(value) and self._loss_watch.reported is None:
                self._say_once(f"{name} is not a finite number any more")
        total = self._stream.total_steps
        speeds = self._throughput.progress(self._logged_step, total)
        self._services.progress.show(
            {"step": self._logged_step, "total": total, "metrics": values, **speeds}
        )

    # ------------------------------------------------------------------ workers that come back

    def _come_back(self) -> None:
        """Take the place of a process of this worker that was lost, at the present step."""
        if self._elastic is not None:
            self._elastic.join()
            return
        meetings = self._services.meetings
        if meetings is None or not meetings.is_away or not self._steps:
            return
        if meetings.take_place(self._take_place) >= 0:
            for step in self._steps:
                step.sync.catch_up()

    def _take_place(self) -> int:
        found = [step.sync.come_back() for step in self._steps]
        returns = [returned for returned in found if returned is not None]
        if not returns:
            self._note_return(Comeback(0, 0))
            return -1  # it was lost before it had joined the others: it is there from the start
        latest = max(returns)
        for step in self._steps:
            step.steps = step.update.steps = latest.step
        self.steps = latest.step
        self._count_steps()
        self._stream.restore(latest.step, None)
        self._throughput.restart()
        self._note_return(latest)
        return latest.step

    def _note_return(self, returned: Comeback) -> None:
        config = self._services.config
        if config.run_dir is not None:
            document = returned._asdict()
            config.run_dir.note_return(self.rank, config.generation, document)

    def _meet(self, act: Callable[[], T]) -> T:
        """Do what all workers do together; one that came back does not do again what was done."""
        if self._elastic is not None:
            return self._elastic.hold(act)
        meetings = self._services.meetings
        if meetings is None:
            return act()
        self._come_back()

        def hold(meeting: Meeting) -> T:
            for step in self._steps:
                step.sync.meet(meeting.number, meeting.generations)
            if self._services.elastic_sum is not None:
                self._services.elastic_sum.begin(meeting.name)
            self._agreement.begin(meeting.name)
            return act()

        result: T = meetings.hold(self._stream.steps_passed, hold)
        return result

    # ------------------------------------------------------------------ elastic runs

    def pack(self) -> dict[str, Any]:
        """See `TrainingState`."""
        with ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(step.sync.full_weights(optimizer=True))
            averages = [ema.gather(True) for ema in self._emas]
            saved = self._snapshot({"steps": self.steps}, averages)
        document = json.loads(json.dumps(saved.document))
        return {"model": saved.model, "optimizer": saved.optimizer, "document": document}

    def unpack(self, state: dict[str, Any], is_new: bool) -> None:
        """See `TrainingState`."""
        saved = checkpoint.Checkpoint(state["model"], state["optimizer"], state["document"])
        source = Path("another worker")
        states = fit(self._steps, saved, source)
        averages = fit_averages(self._emas, saved, source)
        for fitting in states:
            fitting.load()
        if not is_new:
            return  # the script is in this step: it updates averages itself
        for ema, tensors in zip(self._emas, averages, strict=True):
            ema.load(tensors)
        self._start_late(saved.document["steps"])

    def _start_late(self, steps: int) -> None:
        """Go on after these steps of the others."""
        config = self._services.config
        if config.generation and config.run_dir is not None:
            lost_at = config.run_dir.steps_done(self.rank) or 0
            self._note_return(Comeback(steps, lost_at))
        self.steps = steps
        if steps:
            self._count_steps()
        self._stream.restore(steps, None)
        self._throughput.restart()

    def after_regroup(self) -> None:
        """See `TrainingState`."""
        self.replica = self.mesh.dp.rank
        self.replicas = self.mesh.dp.size

    def _steps_under_way(self) -> int:
        """Of a loop of the user's own: a step whose update is done ends with the next batch."""
        return self._loop_steps() if self._loop.has_stepped else 0

    def _loop_steps(self) -> int:
        batch = self._loop.rows.batch
        return 1 if batch is None else batch.concurrent

    def _end_loop_step(self, step: Step, loss: Tensor) -> None:
        """A step of the user's own loop is over."""
        steps = self._loop_steps()
        self._loss_watch.note(self.steps + steps, loss)
        self._throughput.end_step(steps)
        self.steps += steps
        self._count_steps()
        self._save_part(step)
        for callback in self.on_step:
            callback(step, loss)

    def _steps_done(self) -> int:
        self._loop.end_step()
        return self.steps

    def _starting(self) -> AbstractContextManager[None]:
        """Around what waits for servers and other workers before the first step."""
        preemption = self._services.preemption
        return nullcontext() if preemption is None or self.steps else preemption.starting()

    def _must_stop(self) -> bool:
        """After SIGTERM: save where the script has saved before, or let it go on to its end."""
        steps = self._steps_done()
        if self._automatic.is_due(steps):
            self._save_itself()
        preemption = self._services.preemption
        if preemption is None:
            return False
        term = self.strategy.sync_for(self.replicas)
        period = 1 if term.lockstep else term.meets_every
        if not preemption.stops_after(steps, self._is_first, period):
            return False
        self.is_preempted = True
        if self._automatic.folder is not None:
            self._save_itself()
            self._say_once(
                f"preempted: stopped after step {steps}; saved in {self._automatic.folder}"
            )
            raise SystemExit(EXIT_STATUS)
        if self._saved is None:
            self._say_once(f"SIGTERM: stopped after step {self.steps}; nothing was saved before")
            return True
        path, about = self._saved
        self.save(path, about)
        self._say_once(f"SIGTERM: stopped after step {self.steps}; saved in {path}")
        raise SystemExit(EXIT_STATUS)

    def _save_itself(self) -> None:
        """Save in the folder that the launcher has named (SHOAL_CHECKPOINT)."""
        folder = self._automatic.folder
        if folder is not None and self._automatic.saved_at != self.steps:
            last = self._saved
            self.save(folder)
            self._saved = last
            self._automatic.saved_at = self.steps

    def _write(self, path: Path, about: dict[str, Any]) -> str:
        """Write a checkpoint; its digest on the rank that writes, nothing on the others."""
        self._loop.give_settings()
        averages = [ema.gather(self.replica == self._first) for ema in self._emas]
        with ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(step.sync.full_weights(optimizer=True))
            states = [step.sync.state() for step in self._steps]
            if self.replica != self._first:
                return ""
            saved = self._snapshot(self._description(about), averages, states)
            gather_untrained(self._loop.untrained, saved)
            if self._is_first:
                checkpoint.write(path, saved)
            return saved.digest

    def _snapshot(
        self,
        document: dict[str, Any],
        averages: list[tuple[dict[str, Tensor], dict[str, str]]],
        states: list[dict[str, Tensor]] | None = None,
    ) -> checkpoint.Checkpoint:
        """The state of this replica; `states` of the syncs, if all ranks have computed them."""
        document = {**document, "averages": [tied for _, tied in averages]}
        saved = snapshot(self._steps, states or [{} for _ in self._steps], document)
        for i, (tensors, _) in enumerate(averages):
            saved.model |= {f"ema{i}:{name}": tensor for name, tensor in tensors.items()}
        return saved

    def _read(self, path: Path) -> tuple[tuple[checkpoint.Checkpoint, list[FittingState]], str]:
        """A checkpoint that fits, and its digest; nothing is changed."""
        saved = None
        if is_server_checkpoint(path):
            saved = read_servers(path, self._say_once)
        if saved is None:
            saved = checkpoint.read(path)
        return (saved, fit(self._steps, saved, path)), saved.digest

    def _tell_bare(self, names: list[str]) -> None:
        if names:
            self._say_once(
                f"the checkpoint has no optimizer state of {len(names)} parameters, such as "
                f"{names[0]}: the optimizer starts there as in step 0"
            )

    def _count_steps(self) -> None:
        """For the launcher, where the others go on when this worker is lost."""
        if self._services.step_count is not None:
            self._services.step_count.note(self.steps)

    def _save_part(self, step: Step) -> None:
        """Add the part of the workers to a checkpoint that the servers write by themselves."""
        saves = step.sync.saves
        number = None if saves is None else saves.take_accepted()
        if saves is not None and number is not None:
            document = {**self._description({}), "averages": []}
            saves.write(number, lambda: worker_part(step, document))

    def _description(self, about: dict[str, Any]) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "batches": self._stream.delivered,
            "position": self._stream.positions.document(),
            "seed": self.seed,
            "strategy": str(self.strategy),
            "workers": self.size,
            "about": about,
        }

    def _step_context(self) -> StepContext:
        return StepContext(
            strategy=self.strategy,
            mesh=self.mesh,
            device=self.device,
            seed=mix(self.seed, 5, len(self._steps)),
            tracer=self._services.tracer,
            say=self._say_once,
            before_build=self.before_build,
            faults=self._services.faults,
            config=self._services.config,
        )

    def _split(self) -> BatchSplit:
        """How batches are split: into the micro-batches of the latest step."""
        data = self.mesh.data
        if self._steps:
            return self._steps[-1].options.split(data.rank, data.size)
        return BatchSplit(data.rank, data.size)

    def _before_batch(self, batch: AnyBatch) -> None:
        seed = mix(self.seed, 4, self.mesh.data.rank, self._stream.delivered)
        self.generator.manual_seed(seed)
        self._watch_optimizers()
        if self._others is not None and self.mesh.data.size > 1:
            self._others.deliver()
        for step in self._steps:
            step.latest = batch
        self._loop.deliver(batch, self._stream.delivered)
        self._throughput.add_samples(batch.total * batch.concurrent, sum(batch.microbatch_sizes))

    def _after_step(self, step: Step, loss: Tensor) -> None:
        if step.steps > self.steps:  # one step of a job may train several models
            if step.sync.is_skipped and step.latest is not None:  # this replica skipped the step
                self._throughput.remove_samples(sum(step.latest.microbatch_sizes))
            self._loss_watch.note(step.steps, loss)
            self._throughput.end_step(step.steps - self.steps)
            self.steps = step.steps
            self._count_steps()
        self._save_part(step)

    @property
    def _first(self) -> int:
        """The lowest surviving replica."""
        return self._steps[-1].sync.lowest_survivor if self._steps else 0

    @property
    def _is_first(self) -> bool:
        """Whether this is the first worker of the lowest surviving replica, which writes."""
        if self._elastic is not None and self._elastic.group.has_formed:
            return self._elastic.group.rank == 0
        return self.rank == self._first * (self.size // self.replicas)

    def _say_once(self, sentence: str) -> None:
        if self._is_first and sentence not in self._printed:
            self._printed.add(sentence)
            print(f"shoal: {sentence}", file=sys.stderr, flush=True)

    def _latest_step(self) -> Step:
        if not self._steps:
            raise BadInput("job.evaluate comes after job.step: there is no model yet")
        return self._steps[-1]
