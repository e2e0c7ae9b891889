"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput, NotBuilt
from shoal.replica.loss import LossFunction
from shoal.replica.microbatch_context import Precision
from shoal.runtime.trace import LOAD, traced_items
from shoal.strategy.strategy import Strategy
from shoal.sync.optimizer_step import LearningRate, OptimizerFactory, SchedulerFactory
from shoal.train.agreement import Agreement, JobMeetings
from shoal.train.callbacks import Callbacks, numbers_of
from shoal.train.checkpoints.job import JobCheckpoints
from shoal.train.data import AnyBatch
from shoal.train.data.loop_place import calling_frame, place_of_caller
from shoal.train.data.sampling import BatchOptions, BatchSplit, Collate, mix
from shoal.train.data.stream import BatchStream
from shoal.train.job_state import JobState
from shoal.train.named_calls import called_by_name, no_such_name
from shoal.train.own_loop.loop import LoopMethods, OwnLoop
from shoal.train.own_loop.torch_hooks import OtherOptimizers
from shoal.train.same_rules import SameRules
from shoal.train.step.build import build_step
from shoal.train.step.options import Count, OnNan, StepFunctions, StepOptions
from shoal.train.step.run_services import RunServices, StepContext
from shoal.train.step.step import AfterStep, Step
from shoal.train.throughput import LossWatch, Throughput

if TYPE_CHECKING:
    from shoal.train.elastic_training import ElasticTraining
    from shoal.train.evaluate import Metric

_SUFFIXES_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


class Job(LoopMethods):
    """One rank's view of a training run.

    Every rank calls the same methods in the same order. `steps` counts training steps, including
    those of the run that a checkpoint continues.
    """

    _logged_step = 0
    _total_steps: int | None = None
    _is_log_shown = True
    _has_epochs = False  # job.epochs was called

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
        self.before_build: list[Callable[[nn.Module], object]] = []
        self.on_build: list[Callable[[Step], None]] = []
        self.on_step: list[AfterStep] = []
        self._services = services or RunServices()
        self.local_rank = self._services.local_rank
        self.local_size = self._services.local_size
        self._printed: set[str] = set()
        self._loss_watch = LossWatch(self._say_once, self._is_scaled)
        self._logged: dict[str, float | Tensor] = {}
        self._evaluated: dict[str, float] = {}
        self._context = StepContext(
            strategy, self.mesh, device, seed, self._services, self._say_once, self.before_build
        )
        self._stream = BatchStream(
            self.mesh.data, group, device, seed, self._steps_done, self._before_batch
        )
        self._stream.must_stop = self._must_stop
        self._stream.kind = strategy.sync_for(self.replicas).batches
        self._throughput = Throughput(group.size // self.mesh.data.size)
        self._state = JobState(self._context, self.rank, self.size, self._stream, self._throughput)
        self._steps, self._emas = self._state.models, self._state.emas
        self._loop = OwnLoop(mix(seed, 5), self._step_context, self._end_loop_step)
        self._others: OtherOptimizers | None = None
        if self.size > 1:
            own = self._loop.optimizers
            self._others = OtherOptimizers(self._steps, lambda: [o.optimizer for o in own])
        self._elastic = self._train_elastically(group) if isinstance(group, ElasticGroup) else None
        agreement = Agreement(group, self._services.elastic_sum)
        self._meetings = JobMeetings(self._state, agreement, self._elastic)
        self.checkpoints = JobCheckpoints(
            self._state, self._loop, self._meetings, agreement, lambda: self.is_first
        )
        self._compare_ranks()
        given, lost = self._services.callbacks, partial(self._services.lost, self.size)
        self._callbacks = Callbacks(given, lambda: self.is_first, lost)
        self.checkpoints.after_save = partial(self._callbacks.tell, "on_checkpoint")

    def __getattr__(self, name: str) -> Any:
        raise no_such_name(name, [known for known in dir(self) if not known.startswith("_")])

    def _compare_ranks(self) -> None:
        """In steps, at saves, evaluations and the end."""
        self._rules = SameRules(self._group, self._loop.optimizers)
        self._rules.compares &= self._services.elastic_sum is None and self._elastic is None

        def before_save() -> None:
            self._loss_watch.look()
            self._rules.compare()

        self.checkpoints.before_save = before_save
        self.checkpoints.weights = self._weights_digest

    def _train_elastically(self, group: ElasticGroup) -> ElasticTraining:
        from shoal.train.elastic_training import ElasticTraining  # only where it is asked for

        self._stream.same.compares = False  # one who joins later has not been there
        return ElasticTraining(group, self._state, self._after_regroup)

    @property
    def steps(self) -> int:
        """Training steps, including those of the run that a checkpoint continues."""
        return self._state.steps

    @called_by_name
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
        on_nan: OnNan = "stop",
        example: Any = None,
        compile: bool | str = False,
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
        statistics per replica. `on_nan`: at a loss that is not a finite number the run stops, or
        with "skip" a step whose gradients are not finite updates nothing, on all ranks. `example`
        are inputs of a batch, for `pp(n, balance="measured")`. `compile` computes the model by
        torch.compile: True, or the name of one of its modes or backends.
        """
        options = StepOptions(
            clip_norm, accumulate, precision, exact, microbatches, batchnorm, on_nan, compile
        )
        functions = StepFunctions(loss, optimizer, lr, count, scheduler)
        if self._elastic is not None and self._elastic.group.has_formed:
            raise BadInput("in an elastic run job.step comes before the first batch")
        preemption = self._services.preemption
        is_start = preemption is not None and not self.steps  # servers and workers are waited for
        with preemption.starting() if preemption and is_start else nullcontext():
            step = build_step(model, functions, options, self._step_context(), example)
        self._add_step(step)
        return step

    @called_by_name
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
        the background. After `job.load` it skips the batches that the saved run has seen of it.
        """
        self.checkpoints.continue_latest()
        self._meetings.come_back()
        options = BatchOptions(
            batch_size, epochs, steps, shuffle, drop_last, collate, loaders, sampler
        )
        place = self.mesh.data.rank, self.mesh.data.size  # in the micro-batches of the latest step
        split = self._steps[-1].options.split(*place) if self._steps else BatchSplit(*place)
        rows = self._stream.batches(data, split, options)
        self._say_once(self._stream.positions.note)
        batches = traced_items(self._services.tracer, LOAD, "steps", rows)
        return self._loop.over(batches) if self._loop.parts else batches

    def epochs(self, number: int) -> Iterator[int]:
        """The numbers of epochs, 0 to `number` - 1, for a `for` loop around `job.batches`.

        After `job.load` those that are left, from the one that was interrupted.
        """
        self.checkpoints.continue_latest()
        if self._has_epochs:
            raise BadInput("job.epochs counts the epochs of the whole job: use it in one loop only")
        self._has_epochs = True
        positions = self._stream.positions
        for epoch in positions.turns_left(number):
            positions.turn = epoch
            yield epoch

    def stop_after(self, steps: int) -> None:
        """End job.batches after so many steps, if the script does not end it before."""
        self._stream.max_steps = steps

    @called_by_name
    def log(self, **metrics: float | Tensor) -> None:
        """Show progress: the first rank shows the metrics now and then, the others do nothing."""
        names = self._logged.keys()
        self._logged = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in metrics.items()
        }
        # a step of a loop of the user's own, whose update is done, ends with the next batch
        step = self.steps + (self._loop_steps() if self._loop.stepped else 0)
        is_new = step != self._logged_step or names != metrics.keys()
        is_new &= step > 0 or not self._stream.has_delivered
        if step != self._logged_step:
            self._total_steps = self._stream.last_step_at(step)
        self._logged_step = step
        self._is_log_shown = False
        self._callbacks.log(self._logged_step, self._logged)
        if is_new and self._shows_log and self._services.progress.due(step, self._total_steps):
            self._show_log()

    def print(self, *words: Any) -> None:
        """Print once, from rank 0, or from the lowest surviving rank."""
        if self.is_first:
            print(*words, flush=True)

    @called_by_name
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
        latest one), in evaluation mode. `data` is a dataset with indices, or a DataLoader over one.
        """
        from shoal.train.evaluate import Evaluation

        self._refuse_in_finished_epoch("evaluate")
        step = step or next(reversed(self._steps), None)
        if step is None:
            raise BadInput("job.evaluate comes after job.step: there is no model yet")
        services = self._services
        evaluation = Evaluation(metric, step, services.elastic_sum, services.tracer, collate)
        batch_size = batch_size or self._stream.batch_size

        def means() -> dict[str, float]:
            self._rules.compare()
            if self._same_bits and self.size > 1:
                self.checkpoints.check_replicas("job.evaluate")
            return evaluation.means(data, batch_size)

        self._evaluated = self._meetings.hold(means, "job.evaluate")
        is_number = list(self._evaluated) == [""]
        named = {name or "value": value for name, value in self._evaluated.items()}
        self._callbacks.tell("on_evaluate", self.steps, named)
        return self._evaluated[""] if is_number else dict(self._evaluated)

    def map_reduce(
        self,
        map_fn: Callable[[Any], Any],
        items: Iterable[Any],
        reduce_fn: Callable[[Any, Any], Any],
    ) -> Any:
        """See `shoal.map_reduce`: on the workers of this job."""
        from shoal.train.map_reduce import map_reduce_over

        self._refuse_elastic("job.map_reduce")
        return map_reduce_over(self._group, map_fn, items, reduce_fn)

    @called_by_name
    def save(
        self, path: str | Path, about: dict[str, Any] | None = None, *, wait: bool = True
    ) -> None:
        """Save the whole model, the optimizer and the position in the data under `path`.

        Call it on all ranks; rank 0 writes, or the lowest surviving rank. All ranks return when
        the checkpoint is complete; if it cannot be saved, all of them raise. `about` is kept in
        the manifest; it has to be JSON. With `wait=False` they return when rank 0 has a copy, which
        it writes while training goes on: the next save, a load and the end of training wait for it,
        and raise if it could not be written.
        """
        if not str(path):
            raise BadInput('job.save("") names no folder: job.save("model")')
        self._refuse_in_finished_epoch("save")
        if Path(path).suffix in _SUFFIXES_OF_FILES:
            self._say_once(
                f"{path} is a folder, which job.load reads; safetensors reads the file "
                "model-….safetensors in it"
            )
        self.checkpoints.save(Path(path), about or {}, "job.save", wait)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, whatever strategy and number of workers saved it.

        Call it on all ranks, after `job.step`, before `job.batches`. All ranks load the same
        checkpoint, or raise and load nothing. Returns `about` of the checkpoint.
        """
        return self.checkpoints.load(Path(path))

    def close(self) -> None:
        """End the job: print the summary, stop threads, close connections."""
        self._loop.end_batches()
        if sys.exc_info()[0] is None:  # else the others wait for this rank in a step
            self._rules.end()
        self._meetings.end()
        if self._elastic is not None:
            self._elastic.close()
        self._loss_watch.look()
        if not self._is_log_shown and self._shows_log:
            self._show_log()  # the latest, where the number of steps was not known
        if self._others is not None:
            self._others.end()
        if self._stream.is_resumed_later and not self._stream.has_delivered:
            if self._stream.positions.has_reached_all:
                self._say_once(f"nothing is left to train: step {self.steps} was the last one")
            else:
                self._say_once(
                    f"nothing was trained: the checkpoint is of step {self.steps}, and the script "
                    "has ended in epochs that were finished before it"
                )
        for step in self._steps:
            step.sync.close()
            for sentence in step.sync.summary():
                self._say_once(sentence)
        if self._callbacks:
            self._callbacks.end(self.report())

    def report(self) -> dict[str, Any]:
        """What happened on this rank, for machines: JSON-able.

        `logged` is the latest argument of job.log, `evaluated` the latest result of job.evaluate,
        under "" where the metric is one number.
        """
        return {
            "rank": self.rank,
            "steps": self.steps,
            "logged": numbers_of(self._logged),
            "evaluated": self._evaluated,
            **self._throughput.report(self._services.tracer.origin_ns),
            "weights": self._weights_digest(),
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

    def _add_step(self, step: Step) -> None:
        self.checkpoints.check(step)
        step.after = [self._after_step, *self.on_step]
        self._meetings.add(step)
        self._steps.append(step)
        self._stream.trains_in = getattr(calling_frame(), "f_code", None)
        self._stream.same.compares &= step.sync.synchronous
        self._rules.add(step)
        for callback in self.on_build:
            callback(step)

    @property
    def _shows_log(self) -> bool:
        """In an elastic run the first worker that is left, elsewhere rank 0."""
        return self._elastic is None or self.is_first

    def _show_log(self) -> None:
        """Show what was logged last."""
        self._is_log_shown = True
        values = numbers_of(self._logged)
        for name, value in values.items():
            if not math.isfinite(value) and self._loss_watch.reported is None:
                self._say_once(f"{name} is not a finite number any more")
        total = self._total_steps
        if self._steps and not self._steps[-1].sync.synchronous:  # others go on without lost ranks
            self._throughput.present = self._services.present(self.size)
        speeds = self._throughput.progress(self._logged_step, total)
        self._services.progress.show(
            {"step": self._logged_step, "total": total, "metrics": values, **speeds}
        )

    def _after_regroup(self) -> None:
        """There are other replicas than before."""
        self.replica = self.mesh.dp.rank
        self.replicas = self.mesh.dp.size

    def _loop_steps(self) -> int:
        batch = self._loop.rows.batch
        return 1 if batch is None else batch.concurrent

    def _end_loop_step(self, step: Step, loss: Tensor) -> None:
        """A step of the user's own loop is over."""
        steps = self._loop_steps()
        stops = step.options.stops_at_nan and not self.checkpoints.dry
        self._loss_watch.note(self.steps + steps, loss, stops)
        self._count_speed(step, steps)
        self._state.count(self.steps + steps)
        self._rules.note(self.steps)
        self.checkpoints.save_part(step)
        for callback in self.on_step:
            callback(step, loss)
        self._callbacks.step(self.steps, loss)

    def _must_stop(self) -> bool:
        if not self._stream.is_passing:
            self.checkpoints.schedulers.begin()
        return self.checkpoints.must_stop(self._steps_done())

    def _refuse_in_finished_epoch(self, call: str) -> None:
        """It would be of the weights of a later epoch; workers that came back get what it was."""
        stream = self._stream
        will_continue = self.checkpoints.saves_itself and not stream.is_in_loop
        if not (stream.is_passing or will_continue) or self._meetings.takes_returns:
            return
        if stream.positions.in_epochs:
            return
        counters = place_of_caller(stream.trains_in, call).counters
        if stream.is_passing and counters:
            raise BadInput(
                f"job.{call} in an epoch that was finished before the checkpoint would be of the "
                f"weights of step {self.steps}: write `for epoch in job.epochs(n):`, which begins "
                "with the epoch that is left"
            )
        if will_continue and stream.positions.is_counted(counters):
            self._say_once(
                f"a run that continues could not repeat job.{call} in epochs that are finished, "
                "and would end: write `for epoch in job.epochs(n):` around it"
            )

    @property
    def _same_bits(self) -> list[Step]:
        """Steps after which all replicas have the same weights; none where ranks may be lost."""
        if self._services.elastic_sum is not None or self._elastic is not None:
            return []
        return [step for step in self._steps if step.term.same_bits]

    def _weights_digest(self) -> str:
        """Of the weights that replicas have in common, with what they depend on otherwise."""
        data = [step.flat.data.view(torch.int16) for step in self._same_bits]
        bits = [int(each.sum(dtype=torch.int64)) for each in data]
        place = self.mesh.replica_group.rank
        return f"{place} {self._arithmetic().decode()} {bits}" if bits else ""

    def _arithmetic(self) -> bytes:
        """What rounding depends on."""
        cpu = torch.backends.cpu.get_cpu_capability()
        is_cuda = self.device.type == "cuda"
        gpu = torch.cuda.get_device_name(self.device) if is_cuda else ""
        return f"{cpu} {torch.get_num_threads()} {gpu}".encode()

    def _is_scaled(self) -> bool:
        return any(optimizer.is_scaled for optimizer in self._loop.optimizers)

    def _steps_done(self) -> int:
        self._loop.end_step()
        return self.steps

    def _step_context(self) -> StepContext:
        return replace(self._context, seed=mix(self.seed, 5, len(self._steps)))

    def _before_batch(self, batch: AnyBatch) -> None:
        self.checkpoints.schedulers.begin()
        seed = mix(self.seed, 4, self.mesh.data.rank, self._stream.delivered)
        self.generator.manual_seed(seed)
        if self._others is not None and self.mesh.data.size > 1:
            self._others.batches += 1
        for step in self._steps:
            step.latest = batch
        self._loop.deliver(batch, self._stream.delivered)
        self._throughput.add_samples(batch.total * batch.concurrent, sum(batch.microbatch_sizes))

    def _after_step(self, step: Step, loss: Tensor) -> None:
        if step.steps > self.steps:  # one step of a job may train several models
            stops = step.options.stops_at_nan and not self.checkpoints.dry
            self._loss_watch.note(step.steps, loss, stops)
            self._count_speed(step, step.steps - self.steps)
            self._state.count(step.steps)
            self._rules.note(step.steps)
            self._callbacks.step(step.steps, loss)
        self.checkpoints.save_part(step)

    def _count_speed(self, step: Step, steps: int) -> None:
        """What this replica has skipped is not what it does in a second."""
        if step.sync.is_skipped and step.latest is not None:
            self._throughput.recount_samples(sum(step.latest.microbatch_sizes), 0)
        self._throughput.end_step(0 if step.sync.is_skipped else steps)

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker of the lowest surviving replica, which writes."""
        if self._elastic is not None and self._elastic.group.has_formed:
            return self._elastic.group.rank == 0
        return self.rank == self._state.lowest_replica * (self.size // self.replicas)

    def _say_once(self, sentence: str) -> None:
        if sentence and self.is_first and sentence not in self._printed:
            self._printed.add(sentence)
            print(f"shoal: {sentence}", file=sys.stderr, flush=True)
