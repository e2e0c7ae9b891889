"""The job: what a training function is given, on every rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal import checkpoint
from shoal.data import (
    Batch,
    Cut,
    DatasetBatches,
    mix,
    part_of,
    permutation,
)
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.group.group import Group, Op
from shoal.observe.progress import Progress, Silent
from shoal.observe.trace import OFF, Tracer
from shoal.replica.engine import Loss, Precision, call
from shoal.step import Count, Step, StepOptions
from shoal.strategy import Strategy, require_built
from shoal.sync.update import LearningRate, OptimizerFactory
from shoal.tree import map_tensors, tensors_of


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
    ):
        require_built(strategy)
        layout = strategy.layout(group.size)
        self.strategy, self.group, self.device, self.seed = strategy, group, device, seed
        self.rank, self.size = group.rank, group.size
        self.replica, self.replicas = group.rank, layout.replicas
        self.generator = torch.Generator().manual_seed(mix(seed, 4, self.replica))
        self.steps = 0
        self.on_build: list[Callable[[Step], None]] = []
        self.on_step: list[Callable[[Step, Tensor], None]] = []
        self.dry = False  # a trial run: nothing is saved
        self._steps: list[Step] = []
        self._progress, self._tracer = progress or Silent(), tracer
        self._said: set[str] = set()
        self._epochs = self._batches = self._skip = 0
        self._total_steps: int | None = None
        self._batch_size = 256
        self._clock = _Clock()

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
    ) -> Step:
        """Make the function that trains `model` on one batch and returns the batch's loss.

        `loss(outputs, targets)` is a mean over samples, or over what `count(batch)` counts.
        `optimizer` is called with (name, parameter) pairs. `clip_norm` bounds the norm of the
        whole gradient. `accumulate` computes a batch in that many micro-batches. `lr(step)` is
        the learning rate of a step. `exact` gives the same bits at any number of workers that
        divides `microbatches`. `batchnorm="local"` keeps statistics apart.
        """
        options = StepOptions(clip_norm, accumulate, precision, exact, microbatches, batchnorm)
        step = Step(
            model,
            loss,
            optimizer,
            options,
            strategy=self.strategy,
            group=self.group,
            device=self.device,
            seed=mix(self.seed, 5, len(self._steps)),
            lr=lr,
            count=count,
            tracer=self._tracer,
            say=self._say_once,
        )
        step.after = [self._after_step, *self.on_step]
        self._steps.append(step)
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
        cut = (
            self._steps[-1].options.cut(self.replica, self.replicas)
            if self._steps
            else Cut(self.replica, self.replicas)
        )
        epoch_batches: Callable[[int], Iterable[Batch]]
        if batch_size is None:
            self._check_iterable(data, epochs)
            per_epoch = len(data) if isinstance(data, Sized) else None
            epoch_batches = partial(self._iterable_epoch, data, cut)
        else:
            self._check_dataset(data, batch_size, epochs)
            self._batch_size = batch_size
            per_epoch = len(data) // batch_size if drop_last else -(-len(data) // batch_size)
            load = partial(
                DatasetBatches, data, batch_size, cut,
                drop_last=drop_last, collate=collate, loaders=loaders,
            )  # fmt: skip
            epoch_batches = partial(self._dataset_epoch, load, len(data), per_epoch, shuffle)

        def generate() -> Iterator[Batch]:
            self._expect(per_epoch, epochs, steps)
            for _ in range(epochs):
                epoch, self._epochs = self._epochs, self._epochs + 1
                yield from self._deliver(epoch_batches(epoch), steps)

        return generate()

    def log(self, **metrics: float | Tensor) -> None:
        """Show progress: rank 0 shows the metrics now and then, others do nothing."""
        if self._progress.due(self.steps, self._total_steps):
            values = {name: float(value) for name, value in metrics.items()}
            self._progress.show(
                {
                    "step": self.steps,
                    "total": self._total_steps,
                    "metrics": values,
                    **self._clock.read(self.steps, self._total_steps),
                }
            )

    def print(self, *words: Any) -> None:
        """Print once, from rank 0."""
        if self.rank == 0:
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
        model = step.model
        was_training = model.training
        model.eval()
        try:
            sums, samples = self._evaluate_part(metric, step, data, batch_size)
        finally:
            model.train(was_training)
        return self._mean_over_replicas(sums, samples)

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Save the whole model, the optimizer and the place in the data under `path`.

        All ranks call it. `about` is kept in the manifest; it has to be JSON.
        """
        if self.rank == 0 and not self.dry:
            checkpoint.write(Path(path), self._checkpoint(about or {}))
        self.group.barrier().wait()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, whatever strategy and number of workers saved it.

        Call it after `job.step`, before `job.batches`. Returns `about` of the checkpoint.
        """
        path = Path(path)
        saved = checkpoint.read(path)
        models = saved.document.get("models")
        if not self._steps:
            raise ShoalError("job.load comes after job.step: there is no model yet to load into")
        if not isinstance(models, list) or len(models) != len(self._steps):
            raise CheckpointError(
                f"the checkpoint at {path} is of another script: it holds "
                f"{len(models) if isinstance(models, list) else 0} models, and this one "
                f"trains {len(self._steps)}"
            )
        for i, (step, rest) in enumerate(zip(self._steps, models, strict=True)):
            _load_step(step, f"{i}:", saved, rest, path)
        self.steps, self._skip = saved.document["steps"], saved.document["batches"]
        self._batches = self._skip
        self._clock = _Clock(self.steps)
        about = saved.document.get("about", {})
        return about if isinstance(about, dict) else {}

    # ------------------------------------------------------------------ what is behind it

    def _expect(self, per_epoch: int | None, epochs: int, steps: int | None) -> None:
        """Tell progress how many steps there will be."""
        self._total_steps = steps
        if per_epoch is not None:
            to_come = self.steps + max(0, per_epoch * epochs - self._skip)
            self._total_steps = to_come if steps is None else min(steps, to_come)

    def _deliver(self, batches: Iterable[Batch], steps: int | None) -> Iterator[Batch]:
        """Hand out batches; none is fetched that would not be trained on."""
        source = iter(batches)
        while steps is None or self.steps < steps:
            batch = next(source, None)
            if batch is None:
                return
            self._batches += 1
            self.generator.manual_seed(mix(self.seed, 4, self.replica, self._batches))
            for step in self._steps:
                step.latest = batch
            self._clock.samples += batch.total
            yield batch

    def _dataset_epoch(
        self,
        load: Callable[..., DatasetBatches],
        num_samples: int,
        num_batches: int,
        shuffle: bool,
        epoch: int,
    ) -> Iterable[Batch]:
        start = min(self._skip, num_batches)
        self._skip -= start
        if start == num_batches:
            return []
        order = permutation(num_samples, self.seed, epoch) if shuffle else torch.arange(num_samples)
        return load(order, start, loader_seed=mix(self.seed, 6, epoch, self.replica))

    def _iterable_epoch(self, data: Iterable[Any], cut: Cut, epoch: int) -> Iterator[Batch]:
        first = True
        for batch in data:
            if self._skip > 0:
                self._skip -= 1
                continue
            part = part_of(batch, cut)
            if first:
                self._check_same_batch(batch, part.total)
            first = False
            yield part

    def _check_iterable(self, data: Any, epochs: int) -> None:
        if not isinstance(data, Iterable):
            raise BadInput(
                f"job.batches takes a dataset with batch_size, or an iterable of batches; "
                f"{type(data).__name__} is neither"
            )
        if epochs > 1 and isinstance(data, Iterator):
            raise BadInput(
                "job.batches cannot repeat a generator for several epochs: pass a DataLoader or "
                "a list, or epochs=1"
            )

    def _check_same_batch(self, batch: Any, total: int) -> None:
        """Replicas that each make the global batch have to make the same one."""
        if total < self.replicas:
            raise BadInput(
                f"a batch of {total} samples cannot be shared by {self.replicas} replicas: "
                "take a larger batch or fewer workers"
            )
        if self.replicas == 1:
            return
        sums = [_fingerprint(t).to(self.device) for t in tensors_of(tuple(batch))]
        mine = torch.stack([*sums, torch.tensor(total, device=self.device).double()])
        low, high = mine.clone(), mine.clone()
        self.group.all_reduce(low, Op.MIN).wait()
        self.group.all_reduce(high, Op.MAX).wait()
        if not torch.equal(low.nan_to_num(), high.nan_to_num()):
            raise BadInput(
                f"rank {self.rank} and another rank got different global batches from the same "
                "iterable: seed its shuffling, or give job.batches the dataset and a batch_size"
            )

    def _check_dataset(self, data: Any, batch_size: int, epochs: int) -> None:
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise BadInput(
                f"batch_size goes with a map-style dataset (len and indexing), and "
                f"{type(data).__name__} is none; leave it out for an iterable of batches"
            )
        if batch_size < self.replicas:
            raise BadInput(
                f"a batch of {batch_size} samples cannot be shared by {self.replicas} replicas: "
                "take a larger batch_size or fewer workers"
            )
        if len(data) == 0 or epochs < 1:
            raise BadInput("there is nothing to train on: the dataset is empty or epochs is 0")

    def _after_step(self, step: Step, loss: Tensor) -> None:
        self.steps = max(self.steps, step.steps)  # one step of a job may train several models

    def _say_once(self, sentence: str) -> None:
        if self.rank == 0 and sentence not in self._said:
            self._said.add(sentence)
            print(f"shoal: {sentence}", file=sys.stderr, flush=True)

    def _latest_step(self) -> Step:
        if not self._steps:
            raise ShoalError("job.evaluate comes after job.step: there is no model yet")
        return self._steps[-1]

    def _evaluate_part(
        self, metric: Callable[[Any, Any], Any], step: Step, data: Any, size: int | None
    ) -> tuple[dict[str, Tensor], float]:
        """Sums of the metric over this replica's samples. Parts may be empty: no rank waits."""
        cut = Cut(self.replica, self.replicas)
        sums: dict[str, Tensor] = {}
        samples = 0.0
        for batch in DatasetBatches(data, size or self._batch_size, cut, torch.arange(len(data))):
            inputs, targets = map_tensors(lambda t: t.to(self.device), tuple(batch))
            step.engine.presence.real = batch.parts[0] > 0
            with self._tracer.span("forward", "evaluate"):
                found = metric(call(step.model, inputs), targets)
            for name, value in (found if isinstance(found, dict) else {"": found}).items():
                number = torch.as_tensor(value, dtype=torch.float64, device=self.device)
                sums[name] = sums.get(name, torch.zeros_like(number)) + number * batch.parts[0]
            samples += batch.parts[0]
        return sums, samples

    def _mean_over_replicas(self, sums: dict[str, Tensor], samples: float) -> Any:
        if not sums:
            raise BadInput("job.evaluate got no samples")
        names = sorted(sums)
        total = torch.tensor(samples, dtype=torch.float64, device=self.device)
        everything = torch.stack([sums[name] for name in names] + [total])
        self.group.all_reduce(everything).wait()
        means = (everything[:-1] / everything[-1]).tolist()
        return means[0] if names == [""] else dict(zip(names, means, strict=True))

    def _checkpoint(self, about: dict[str, Any]) -> checkpoint.Checkpoint:
        saved = checkpoint.Checkpoint(
            {},
            {},
            {
                "steps": self.steps,
                "batches": self._batches,
                "seed": self.seed,
                "strategy": str(self.strategy),
                "workers": self.size,
                "about": about,
                "models": [],
            },
        )
        for i, step in enumerate(self._steps):
            tensors, tied = checkpoint.model_tensors(step.model)
            state, rest = checkpoint.optimizer_tensors(step.update.optimizer, step.flat.named)
            saved.model |= {f"{i}:{name}": tensor for name, tensor in tensors.items()}
            saved.optimizer |= {f"{i}:{name}": tensor for name, tensor in state.items()}
            scaler = step.update.scaler
            saved.document["models"].append(
                {
                    "tied": tied,
                    "optimizer": rest,
                    "steps": step.steps,
                    "scaler": None if scaler is None else scaler.state_dict(),
                }
            )
        return saved


def _fingerprint(tensor: Tensor) -> Tensor:
    """One number that tells the same values in another order apart."""
    flat = tensor.detach().flatten().double()
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return torch.dot(flat, places.sqrt())


def _load_step(
    step: Step, prefix: str, saved: checkpoint.Checkpoint, rest: Any, path: Path
) -> None:
    steps = rest.get("steps") if isinstance(rest, dict) else None
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"the checkpoint at {path} is damaged: its models")
    model, optimizer = (
        {name.removeprefix(prefix): t for name, t in part.items() if name.startswith(prefix)}
        for part in (saved.model, saved.optimizer)
    )
    checkpoint.load_model(step.model, model, rest.get("tied"), path)
    checkpoint.load_optimizer(
        step.update.optimizer, step.flat.named, optimizer, rest.get("optimizer"), path
    )
    step.steps = step.update.steps = rest["steps"]
    if step.update.scaler is not None and isinstance(rest.get("scaler"), dict):
        step.update.scaler.load_state_dict(rest["scaler"])


class _Clock:
    """Samples a second since the run began, and the time that is left at that pace."""

    def __init__(self, steps: int = 0):
        self._start_steps, self.samples = steps, 0
        self._start_s: float | None = None

    def read(self, steps: int, total: int | None) -> dict[str, float | None]:
        now = time.monotonic()
        if self._start_s is None:  # the first step carries start-up costs: count from its end
            self._start_s, self._start_steps, self.samples = now, steps, 0
            return {"samples_per_s": None, "left_s": None}
        passed, done = now - self._start_s, steps - self._start_steps
        if passed <= 0 or done <= 0:
            return {"samples_per_s": None, "left_s": None}
        left = None if total is None else passed / done * (total - steps)
        return {"samples_per_s": self.samples / passed, "left_s": left}
