"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.comm.elastic import ElasticSum
from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.data.redistribute import Deal
from shoal.data.sampling import (
    Batch,
    Cut,
    DatasetBatches,
    mix,
)
from shoal.data.stream import Feed
from shoal.errors import BadInput
from shoal.observe.progress import Progress, Silent
from shoal.observe.throughput import Pace
from shoal.observe.trace import OFF, Tracer
from shoal.pytree import map_tensors
from shoal.replica.microbatch import Loss, Precision, preserve_modes
from shoal.runtime.faults import Faults
from shoal.strategy.base import Batches
from shoal.strategy.strategy import Strategy
from shoal.sync.optimizer_step import LearningRate, OptimizerFactory
from shoal.train import checkpoint
from shoal.train.map_reduce import map_reduce_over
from shoal.train.state import restore, snapshot
from shoal.train.step import Count, Step, StepOptions


class Job:
    """One rank's view of a training run.

    Every rank calls the same methods in the same order. `steps` counts training steps, also
    those of the run that a checkpoint continues.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        *,
        device: torch.device,
        seed: int = 0,
        progress: Progress | None = None,
        tracer: Tracer = OFF,
        faults: Faults | None = None,
        tally: ElasticSum | None = None,
    ):
        strategy.require_built()
        layout = strategy.layout(group.size)
        self.strategy = strategy
        self.group = group
        self.device = device
        self.seed = seed
        self.rank = group.rank
        self.size = group.size
        self.mesh = Mesh.of(group, layout)
        self.replica = self.mesh.dp.rank
        self.replicas = layout.replicas
        self.generator = torch.Generator().manual_seed(mix(seed, 4, self.replica))
        self.steps = 0
        self.on_build: list[Callable[[Step], None]] = []
        self.on_step: list[Callable[[Step, Tensor], None]] = []
        self.dry = False  # a trial run: nothing is saved
        self._steps: list[Step] = []
        self._progress = progress or Silent()
        self._tracer = tracer
        self._faults = faults
        self._tally = tally  # how to add up where ranks may be lost
        self._said: set[str] = set()
        self._logged: dict[str, float | Tensor] = {}
        self._evaluated: dict[str, float] = {}
        self._feed = Feed(
            self.mesh.dp, device, seed, lambda: self.steps, self._before_batch, self._say_once
        )
        batches = strategy.sync_for(self.replicas).batches
        self._feed.turns = batches is Batches.IN_TURNS
        self._feed.everything = batches is Batches.WHOLE_DATASET
        self._clock = _Clock()
        self._pace = Pace()

    def step(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        optimizer: OptimizerFactory,
        clip_norm: float | None = None,
        accumulate: int = 1,
        precision: Precision = "fp32",
        lr: LearningRate | None = None,
        exact: bool = False,
        microbatches: int = 8,
        count: Count | None = None,
        batchnorm: Literal["global", "local"] = "global",
        example: Any = None,
    ) -> Step:
        """Make the function that trains `model` on one batch and returns the batch's loss.

        `loss(outputs, targets)` is a mean over samples, or over what `count(batch)` counts.
        `optimizer` is called with (name, parameter) pairs. `clip_norm` bounds the norm of the
        whole gradient. `accumulate` computes a batch in that many micro-batches. `lr(step)` is
        the learning rate of a step. `exact` gives the same bits at any number of workers that
        divides `microbatches`. `batchnorm="local"` keeps statistics apart. `example` are inputs
        of a batch, for `pp(n, balance="measured")`.
        """
        options = StepOptions(clip_norm, accumulate, precision, exact, microbatches, batchnorm)
        step = Step(
            model,
            loss,
            optimizer,
            options,
            strategy=self.strategy,
            mesh=self.mesh,
            device=self.device,
            seed=mix(self.seed, 5, len(self._steps)),
            lr=lr,
            count=count,
            tracer=self._tracer,
            say=self._say_once,
            faults=self._faults,
            example=example,
        )
        step.after = [self._after_step, *self.on_step]
        self._steps.append(step)
        self._feed.compares &= step.sync.synchronous
        for built in self.on_build:
            built(step)
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
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
    ) -> Iterator[Batch]:
        """This replica's part of every global batch.

        `data` is a map-style dataset of (input, target) samples, with `batch_size` samples in a
        global batch; or any iterable of global batches, such as a DataLoader, without
        `batch_size`. It ends after `epochs`, or when the job has done `steps` steps. `loaders`
        processes fetch samples in the background. After `job.load` the batches that the saved
        run has seen are passed over.
        """
        return self._feed.batches(
            data,
            batch_size,
            self._cut(),
            epochs=epochs,
            steps=steps,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=collate,
            loaders=loaders,
        )

    def stop_after(self, steps: int) -> None:
        """Let job.batches end after so many steps, if the script does not end it before."""
        self._feed.most_steps = steps

    def log(self, **metrics: float | Tensor) -> None:
        """Show progress: rank 0 shows the metrics now and then, others do nothing."""
        self._logged = metrics
        if self._progress.due(self.steps, self._feed.total_steps):
            values = {name: float(value) for name, value in metrics.items()}
            for name, value in values.items():
                if not math.isfinite(value):
                    self._say_once(f"{name} is not a finite number any more")
            self._progress.show(
                {
                    "step": self.steps,
                    "total": self._feed.total_steps,
                    "metrics": values,
                    **self._clock.read(self.steps, self._feed.total_steps),
                }
            )

    def print(self, *words: Any) -> None:
        """Print once, from rank 0, or the first rank that is left."""
        if self._is_first:
            print(*words, flush=True)

    @torch.no_grad()
    def evaluate(
        self,
        metric: Callable[[Any, Any], Any],
        data: Any,
        batch_size: int | None = None,
        step: Step | None = None,
    ) -> Any:
        """The mean of `metric(outputs, targets)` over all samples of `data`, on every rank.

        `metric` returns a number that is a mean over the samples it was given, or a dict of
        such numbers; the result has the same form. The model is that of `step`, or of the
        latest one, in evaluation mode.
        """
        step = step or self._latest_step()
        with preserve_modes(step.model):
            step.model.eval()
            with step.sync.evaluating():
                found = self._evaluate(metric, step, data, batch_size)
        names, everything = step.shard.broadcast(found)
        means = [value / everything[-1] for value in everything[:-1]]
        self._evaluated = dict(zip(names, means, strict=True))
        return means[0] if names == [""] else dict(self._evaluated)

    def map_reduce(
        self,
        map_fn: Callable[[Any], Any],
        items: Iterable[Any],
        reduce_fn: Callable[[Any, Any], Any],
    ) -> Any:
        """See `shoal.map_reduce`: on the workers of this job."""
        return map_reduce_over(self.group, map_fn, items, reduce_fn)

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Save the whole model, the optimizer and the place in the data under `path`.

        Call it on all ranks; rank 0 writes, or the first rank that is left. `about` is kept in
        the manifest; it has to be JSON.
        """
        if self.dry:
            return
        with ExitStack() as stack:
            for step in self._steps:
                stack.enter_context(step.sync.full_weights(optimizer=True))
            states = [step.sync.state() for step in self._steps]
            if self.replica != self._first:
                return
            document = {
                "steps": self.steps,
                "batches": self._feed.delivered,
                "seed": self.seed,
                "strategy": str(self.strategy),
                "workers": self.size,
                "about": about or {},
            }
            saved = snapshot(self._steps, states, document)
            if self._is_first:
                checkpoint.write(Path(path), saved)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, whatever strategy and number of workers saved it.

        Call it after `job.step`, before `job.batches`. Returns `about` of the checkpoint.
        """
        path = Path(path)
        saved = checkpoint.read(path)
        if not self._steps:
            raise BadInput("job.load comes after job.step: there is no model yet to load into")
        restore(self._steps, saved, path)
        self.steps = saved.document["steps"]
        self._feed.skip = self._feed.delivered = saved.document["batches"]
        self._clock = _Clock(self.steps)
        about = saved.document.get("about", {})
        return about if isinstance(about, dict) else {}

    def close(self) -> None:
        """The training function is done: tell what happened, and let go of what was opened."""
        for step in self._steps:
            step.sync.close()
            for sentence in step.sync.summary():
                self._say_once(sentence)

    def report(self) -> dict[str, Any]:
        """What happened on this rank, for machines: JSON-able.

        `logged` is what job.log was given last, `evaluated` what job.evaluate found last, under
        "" where the metric is one number.
        """
        return {
            "rank": self.rank,
            "steps": self.steps,
            "logged": {name: float(value) for name, value in self._logged.items()},
            "evaluated": self._evaluated,
            **self._pace.read(self._tracer.origin_ns),
            "sync": [step.sync.report() for step in self._steps],
        }

    # ------------------------------------------------------------------ what is behind it

    def _cut(self) -> Cut:
        """How batches are dealt out: as the latest step wants its micro-batches."""
        if self._steps:
            return self._steps[-1].options.cut(self.replica, self.replicas)
        return Cut(self.replica, self.replicas)

    def _before_batch(self, batch: Batch) -> None:
        seed = mix(self.seed, 4, self.replica, self._feed.delivered)
        self.generator.manual_seed(seed)
        for step in self._steps:
            step.latest = batch
        self._clock.samples += batch.total * batch.of
        self._pace.samples += sum(batch.parts)

    def _after_step(self, step: Step, loss: Tensor) -> None:
        if step.steps > self.steps:  # one step of a job may train several models
            if step.sync.is_skipped and step.latest is not None:
                self._pace.samples -= sum(step.latest.parts)  # it was left out
            self._pace.note(step.steps - self.steps)
            self.steps = step.steps

    @property
    def _first(self) -> int:
        """The first replica that is left."""
        return self._steps[-1].sync.lowest_survivor if self._steps else 0

    @property
    def _is_first(self) -> bool:
        """Whether this is the first worker of the first replica, which writes and speaks."""
        return self.rank == self._first * self._parts

    @property
    def _parts(self) -> int:
        """Workers of a replica."""
        return self.size // self.replicas

    def _say_once(self, sentence: str) -> None:
        if self._is_first and sentence not in self._said:
            self._said.add(sentence)
            print(f"shoal: {sentence}", file=sys.stderr, flush=True)

    def _latest_step(self) -> Step:
        if not self._steps:
            raise BadInput("job.evaluate comes after job.step: there is no model yet")
        return self._steps[-1]

    def _evaluate(
        self, metric: Callable[[Any, Any], Any], step: Step, data: Any, size: int | None
    ) -> tuple[list[str], list[float]]:
        """Names of the metric, and its sums over all samples, with their number at the end.

        Where ranks may be lost, what they had is dealt out again until nothing is missing.
        """
        deal = Deal(
            torch.arange(len(data)), tuple(range(self.replicas)), size or self._feed.batch_size
        )
        names, sums = self._evaluate_part(metric, step, deal.batches(data, self.replica))
        if self._tally is None:
            if step.engine.is_last:
                self.mesh.dp.all_reduce(sums).wait()
            return names, sums.tolist()
        everything, missing = self._add_up(self._tally, step, sums, deal.ranks)
        while len((deal := deal.without(missing)).samples):
            _, sums = self._evaluate_part(metric, step, deal.batches(data, self.replica))
            more, missing = self._add_up(self._tally, step, sums, deal.ranks)
            everything = [a + b for a, b in zip(everything, more, strict=True)]
        return names, everything

    def _add_up(
        self, tally: ElasticSum, step: Step, sums: Tensor, replicas: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        """Over the replicas that are left, and those that are not.

        One worker of the last stage asks, so that all workers of a replica hear the same.
        """
        speaker = self._parts - self.mesh.tp.size
        missing = torch.zeros(self.replicas, dtype=torch.float64, device=self.device)
        if step.engine.is_last and self.mesh.tp.rank == 0:
            ranks = [replica * self._parts + speaker for replica in replicas]
            numbers, gone = tally.all_reduce(sums.tolist(), ranks)
            sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            missing[[rank // self._parts for rank in gone]] = 1.0
        if step.engine.is_last:
            self.mesh.tp.broadcast(sums).wait()
            self.mesh.tp.broadcast(missing).wait()
        sums, missing = step.shard.broadcast((sums, missing))
        return sums.tolist(), [replica for replica in replicas if missing[replica]]

    def _evaluate_part(
        self, metric: Callable[[Any, Any], Any], step: Step, batches: DatasetBatches
    ) -> tuple[list[str], Tensor]:
        """Sums over this replica's samples. Parts may be empty: no rank waits."""
        sums: dict[str, Tensor] = {}
        samples = 0.0
        for batch in batches:
            inputs, targets = map_tensors(lambda t: t.to(self.device), tuple(batch))
            step.engine.presence.real = batch.parts[0] > 0
            with self._tracer.span("forward", "evaluate"):
                outputs = step.engine.predict(inputs)
                found = metric(outputs, targets) if step.engine.is_last else {}
            for name, value in (found if isinstance(found, dict) else {"": found}).items():
                number = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                if number.dim():
                    raise BadInput(
                        "the metric of job.evaluate has to be one number, the mean over the "
                        f"samples it is given, and it is {tuple(number.shape)}"
                    )
                sums[name] = sums.get(name, torch.zeros_like(number)) + number * batch.parts[0]
            samples += batch.parts[0]
        if not sums and step.engine.is_last:
            raise BadInput("job.evaluate got no samples")
        names = sorted(sums)
        total = torch.tensor(samples, dtype=torch.float64, device=self.device)
        return names, torch.stack([sums[name] for name in names] + [total])


class _Clock:
    """Samples a second since the run began, and the time that is left at that pace."""

    def __init__(self, steps: int = 0):
        self._start_steps = steps
        self.samples = 0
        self._start_s: float | None = None

    def read(self, steps: int, total: int | None) -> dict[str, float | None]:
        now = time.monotonic()
        if self._start_s is None:  # the first step carries start-up costs: count from its end
            self._start_s = now
            self._start_steps = steps
            self.samples = 0
            return {"samples_per_s": None, "left_s": None}
        passed = now - self._start_s
        done = steps - self._start_steps
        if passed <= 0 or done <= 0:
            return {"samples_per_s": None, "left_s": None}
        left = None if total is None else passed / done * (total - steps)
        return {"samples_per_s": self.samples / passed, "left_s": left}
