"""A metric over a dataset, computed by all replicas, those that survive a loss included.

replica 0   samples 0 1 2   sums ─┐
replica 1   samples 3 4 5   lost  ├─▶ sum over 0 and 2; samples 3 4 5 are assigned again
replica 2   samples 6 7 8   sums ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from shoal.comm.members.elastic_sum import ElasticSum
from shoal.errors import BadInput
from shoal.replica.loss import BoundLoss
from shoal.replica.microbatch_context import preserve_modes
from shoal.runtime.trace import EVALUATE, OFF, Tracer
from shoal.train.data import AnyBatch
from shoal.train.data.batch_checks import is_stream
from shoal.train.data.rows import move_to
from shoal.train.data.sampling import BatchOptions, BatchSplit, Collate, DatasetBatches
from shoal.train.data.sources import draw_order
from shoal.train.step.step import Step


@dataclass(frozen=True)
class SampleAssignment:
    """Every batch of `samples`, in order, is split over `ranks`."""

    dataset: Any
    samples: Tensor  # their indices in the dataset
    ranks: tuple[int, ...]
    batch_size: int
    collate: Collate | None = None

    @classmethod
    def of(
        cls, data: Any, ranks: int, batch_size: int, collate: Collate | None
    ) -> SampleAssignment:
        """`data` as a user gives it; BadInput for what has no indices."""
        everyone = tuple(range(ranks))
        batches = data.batch_sampler if isinstance(data, DataLoader) else None
        if batches is not None and not is_stream(data.dataset):
            drawn = _drawn_by(data, batches)  # all ranks draw the same ones
            collate = collate or data.collate_fn
            return cls(data.dataset, drawn, everyone, data.batch_size or batch_size, collate)
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise BadInput(
                "job.evaluate takes a dataset with indices (len and indexing), or a DataLoader "
                f"over one in batches, and {type(data).__name__} is neither"
            )
        return cls(data, torch.arange(len(data)), everyone, batch_size, collate)

    def batches(self, rank: int) -> DatasetBatches:
        """The batches of one rank."""
        options = BatchOptions(self.batch_size, collate=self.collate)
        return DatasetBatches(self.dataset, self.samples, self._split(rank), options)

    def without(self, missing: Collection[int]) -> SampleAssignment:
        """The samples of the missing ranks, assigned to the others."""
        lost = [
            batch[rows.start : rows.stop]
            for rank in missing
            for batch in torch.split(self.samples, self.batch_size)
            for rows in self._split(rank).rows(len(batch))
        ]
        surviving = tuple(rank for rank in self.ranks if rank not in missing)
        return replace(self, samples=torch.cat([self.samples[:0], *lost]), ranks=surviving)

    def _split(self, rank: int) -> BatchSplit:
        return BatchSplit(self.ranks.index(rank), len(self.ranks))


def _drawn_by(loader: DataLoader[Any], batches: Any) -> Tensor:
    """The samples that the loader would take."""
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BadInput(
            "job.evaluate divides the samples itself, and a DistributedSampler takes those of "
            "one worker: leave it out"
        )
    count = len(loader.dataset)  # type: ignore[arg-type]
    return draw_order((index for batch in batches for index in batch), None, count, seed=0)


Metric = Callable[..., Any]  # (outputs, targets) to a number or a dict of numbers


@dataclass(frozen=True)
class Evaluation:
    """One metric of the model of one step. `elastic_sum` is for runs where ranks may be lost."""

    metric: Metric
    step: Step
    elastic_sum: ElasticSum | None = None
    tracer: Tracer = OFF
    collate: Collate | None = None

    @torch.no_grad()
    def means(self, data: Any, batch_size: int) -> dict[str, float]:
        """The mean of the metric over all samples, on every rank; "" if it has no name."""
        model = self.step.model
        ranks = self.step.mesh.dp.size
        assignment = SampleAssignment.of(data, ranks, batch_size, self.collate)
        shown = self.tracer.span(EVALUATE, track="steps")
        with shown, preserve_modes(model), self.tracer.sent.uncounted():
            model.eval()
            with self.step.sync.evaluating():
                sums = self._sum_all(assignment)
        names, totals = self.step.shard.broadcast(sums)
        means = [value / totals[-1] for value in totals[:-1]]
        return dict(zip(names, means, strict=True))

    def _sum_all(self, assignment: SampleAssignment) -> tuple[list[str], list[float]]:
        """Names of the metric, and its sums over all samples, with their number at the end."""
        mesh = self.step.mesh
        names, sums = self._sum_local(assignment.batches(mesh.dp.rank))
        if self.elastic_sum is None:
            if self.step.engine.stage.is_last:
                mesh.dp.all_reduce(sums).wait()
            return names, sums.tolist()
        totals, missing = self._sum_survivors(self.elastic_sum, sums, assignment.ranks)
        while len((assignment := assignment.without(missing)).samples):
            _, sums = self._sum_local(assignment.batches(mesh.dp.rank))
            more, missing = self._sum_survivors(self.elastic_sum, sums, assignment.ranks)
            totals = [a + b for a, b in zip(totals, more, strict=True)]
        return names, totals

    def _sum_survivors(
        self, elastic_sum: ElasticSum, sums: Tensor, replicas: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        """The sums over the surviving replicas, and the missing replicas.

        One worker of the last stage asks, so that all workers of a replica get the same answer.
        """
        mesh = self.step.mesh
        workers = mesh.world.size // mesh.dp.size  # of a replica
        missing = torch.zeros(mesh.dp.size, dtype=torch.float64, device=self._device)
        stage = mesh.stage_group
        if self.step.engine.stage.is_last and stage.is_leader:
            speaker = workers - stage.size
            ranks = [replica * workers + speaker for replica in replicas]
            numbers, missing_ranks = elastic_sum.all_reduce(sums.tolist(), ranks)
            sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            missing[[rank // workers for rank in missing_ranks]] = 1.0
        if self.step.engine.stage.is_last:
            stage.broadcast(sums)
            stage.broadcast(missing)
        sums, missing = self.step.shard.broadcast((sums, missing))
        return sums.tolist(), [replica for replica in replicas if missing[replica]]

    def _sum_local(self, batches: DatasetBatches) -> tuple[list[str], Tensor]:
        """Sums over this replica's samples. A batch may have none, so that no rank waits."""
        sums: dict[str, Tensor] = {}
        samples = 0.0
        for batch in batches:
            size = batch.microbatch_sizes[0]
            for name, number in self._metrics_of(batch).items():
                sums[name] = sums.get(name, torch.zeros_like(number)) + number * size
            samples += size
        if not sums and self.step.engine.stage.is_last:
            raise BadInput("job.evaluate got no samples")
        names = sorted(sums)
        total = torch.tensor(samples, dtype=torch.float64, device=self._device)
        return names, torch.stack([sums[name] for name in names] + [total])

    def _metrics_of(self, batch: AnyBatch) -> dict[str, Tensor]:
        """The metric of one batch by name, where the outputs are known."""
        engine = self.step.engine
        content = move_to(batch.content, self._device)
        inputs, targets = self.step.cutter.forward.arguments(content, batch.rows)
        metric = BoundLoss(self.metric)
        engine.forward_state.rows_are_real = batch.microbatch_sizes[0] > 0
        with self.tracer.span("forward", "evaluate"), self.step.compile_errors():
            outputs = engine.stage.predict(inputs)
            values = metric(outputs, targets) if engine.stage.is_last else {}
        numbers = {}
        for name, value in (values if isinstance(values, dict) else {"": values}).items():
            numbers[name] = torch.as_tensor(value, dtype=torch.float64, device=self._device)
            if numbers[name].dim():
                raise BadInput(
                    "the metric of job.evaluate has to be one number, the mean over the samples it "
                    f"is given, and it is {tuple(numbers[name].shape)}"
                )
        return numbers

    @property
    def _device(self) -> torch.device:
        return self.step.flat.device
