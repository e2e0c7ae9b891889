"""One training step as a callable: forward, backward, synchronization and update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.data.batch import AnyBatch, Batch, DictBatch
from shoal.data.sampling import FullDatasetBatch
from shoal.embedding.module import Embedding, apply_embeddings
from shoal.observe.trace import OFF, STEP, Tracer
from shoal.replica.batchnorm import update_running_statistics
from shoal.replica.engine import Engine
from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_buckets import OnBucket
from shoal.replica.loss import in_form_of
from shoal.replica.microbatch import MicroBatch
from shoal.replica.shard import ReplicaShard
from shoal.schedules.pipelines.actions import accumulate
from shoal.strategy.base import SyncTerm
from shoal.sync.base import Sync
from shoal.sync.optimizer_step import OptimizerStep
from shoal.train.cut_batch import BatchCutter, concurrent_batches, fraction_of
from shoal.train.known_parameters import KnownParameters
from shoal.train.options import StepOptions

Compute = Callable[[Sequence[MicroBatch], OnBucket], Tensor]
AfterStep = Callable[["Step", Tensor], None]


@dataclass(eq=False)
class Step:
    """`step(batch)` trains on a global batch and returns its loss, the same on every rank.

    `build_step` makes it. `compute` is `engine.run`, with injected faults around it if asked for.
    """

    model: nn.Module
    options: StepOptions
    term: SyncTerm
    mesh: Mesh
    shard: ReplicaShard
    flat: FlatParams
    update: OptimizerStep
    sync: Sync
    engine: Engine
    compute: Compute
    cutter: BatchCutter
    embeddings: list[Embedding]
    parameters: KnownParameters
    tracer: Tracer = OFF
    steps: int = 0
    latest: AnyBatch | None = None  # what job.batches yielded last
    after: list[AfterStep] = field(default_factory=list)
    is_own_loop: bool = False  # the script computes forward, loss and backward itself
    saves_model: bool = True  # False: another step of the job saves the same model
    _is_checked: bool = False
    _names: list[str] | None = None  # of what the loss function returns besides the loss
    _numbers: list[Tensor] = field(default_factory=list)

    def __call__(self, batch: Any) -> Any:
        """The loss; where the loss function returns several numbers, all of them in its form."""
        start_ns = time.monotonic_ns()
        self.parameters.check()
        known = batch if isinstance(batch, (Batch, DictBatch)) else self.latest
        microbatches = self.cutter.cut(batch, known, self.steps)
        self.sync.batch_fraction = self._replica_fraction(batch, microbatches)
        self.sync.next_steps = self.steps + concurrent_batches(known)
        self.sync.begin()
        loss = self.shard.broadcast_loss(
            self.sync.skip() if self.sync.is_skipped else self._train(batch, microbatches)
        )
        self._count(concurrent_batches(known))
        self.tracer.add(STEP, start_ns, time.monotonic_ns(), "steps", f"step {self.steps}")
        for callback in self.after:
            callback(self, loss)
        return in_form_of(self._names, loss, self._numbers)

    def _train(self, batch: Any, microbatches: Sequence[MicroBatch]) -> Tensor:
        is_dataset = isinstance(batch, FullDatasetBatch)
        if is_dataset and len(microbatches) != len(self.engine.actions) // 2:
            self.engine.follow(accumulate(1, 0, len(microbatches)))
        if not self._is_checked:
            self.shard.check(microbatches, self.engine)
            self._is_checked = True
        local = self.shard.token_axes.sum(self.compute(microbatches, self.sync.reduce))
        if not self.flat.grads.buckets:
            self.shard.token_axes.sum_parameter_gradients(self.flat.params)
        if self.embeddings:  # before `finish`, since the rows are part of the update
            self._push_rows(is_dataset or any(m.real for m in microbatches))
        self.sync.finish()
        if self.options.exact:
            update_running_statistics(self.model, self.mesh.dp)
        self._numbers = self._other_numbers()
        return self.sync.loss(local)

    def _other_numbers(self) -> list[Tensor]:
        """What the loss function returned besides the loss: means over the global batch.

        Where replicas do not take every step together they are means over its own samples.
        """
        if self._names is None:  # the last stage of a pipeline alone calls the loss
            self._names = self.shard.broadcast(self.engine.numbers.names or [])
        if not self._names:
            return []
        numbers = torch.zeros(len(self._names), dtype=torch.float64, device=self.flat.device)
        if self.engine.is_last:
            numbers = self.shard.token_axes.sum(self.engine.numbers.total(self.flat.device))
        if self.term.lockstep and self.sync.synchronous:
            self.mesh.dp.all_reduce(numbers).wait()
        elif self.sync.batch_fraction:
            numbers = numbers / self.sync.batch_fraction
        return list(self.shard.broadcast(numbers).float().unbind())

    def _replica_fraction(self, batch: Any, microbatches: Sequence[MicroBatch]) -> float:
        fraction = fraction_of(batch, microbatches)
        axes = self.shard.token_axes
        return (
            float(axes.sum(torch.tensor(fraction, device=self.flat.device))) if axes else fraction
        )

    def _push_rows(self, has_samples: bool) -> None:
        if not has_samples:  # the lookups of a placeholder row do not count
            for embedding in self.embeddings:
                embedding.discard()
        lr = self.update.learning_rate(self.steps)
        apply_embeddings(self.embeddings, lr, self.update.optimizer.defaults.get("lr"))

    def _count(self, steps: int) -> None:
        self.steps += steps
        self.update.steps += steps - 1  # the sync has counted one, if this rank updates
