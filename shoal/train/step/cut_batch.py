"""A batch becomes micro-batches on the device, each with its share of the global loss."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica.loss import LossArguments
from shoal.replica.microbatch_context import MicroBatch
from shoal.runtime.pytree import Tree, tensors_of
from shoal.schedules.addition_tree import runs_of
from shoal.train.data import AnyBatch, Batch, DictBatch, batch_of
from shoal.train.data.rows import (
    is_list_of_samples,
    move_to,
    num_rows,
    reverse_rows,
    take_rows,
    widen,
)
from shoal.train.data.sampling import BatchSplit, FullDatasetBatch, mix
from shoal.train.step.options import Count, StepOptions


class ForwardSignature:
    """Which entries of a dict the forward of a model takes."""

    def __init__(self, model: nn.Module):
        parameters = inspect.signature(model.forward).parameters.values()
        self._model = type(model).__name__
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._names = [p.name for p in parameters if p.kind in named]

    def arguments(self, content: Any, samples: int) -> tuple[Any, Any]:
        """Inputs of the model and targets of the loss, of a batch of so many samples."""
        if not isinstance(content, (tuple, list)):
            if isinstance(content, Mapping):
                return self._entries(content), LossArguments.optional(content)
            return (content,), LossArguments.optional(content)
        inputs, *others = content
        if is_list_of_samples(inputs, samples):
            inputs = (inputs,)  # one argument; a list of other tensors is one argument each
        if len(others) == 1:
            return inputs, others[0]
        return inputs, LossArguments(others) if others else LossArguments.optional(content[0])

    def _entries(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """All that forward names; what only `**kwargs` takes, if it holds tensors."""
        taken = {
            name: value
            for name, value in content.items()
            if name in self._names or (self._takes_any and tensors_of(value))
        }
        if not taken:
            raise BadInput(
                f"the batch is a dict with {', '.join(map(str, content))}, and the forward of "
                f"{self._model} takes {', '.join(self._names) or 'nothing'}: give the entries the "
                "names of its arguments, or make the batch a pair (inputs, targets)"
            )
        return taken


_SMALLEST_COUNT = 1e-300  # a divisor where nothing is counted
Weight = float | Callable[[], Tensor]


class LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are made when the engine gets to them; only one is in memory."""

    def __init__(self, source: Iterator[MicroBatch], length: int):
        self._source = source
        self._length = length
        self._current: tuple[int, MicroBatch] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, m: Any) -> Any:
        if self._current is None or self._current[0] != m:
            self._current = (m, next(self._source))
        return self._current[1]


def _in_one(batch: AnyBatch) -> AnyBatch:
    """The rows of all micro-batches of a batch, without those that stand in for none."""
    sizes = batch.microbatch_sizes
    ends = list(itertools.accumulate(max(1, size) for size in sizes))
    ranges = [range(end - size, end) for size, end in zip(sizes, ends, strict=True) if size]
    content = take_rows(batch.content, ranges or [range(0)], batch.rows)
    return batch_of(content, batch.total, [sum(sizes)])


@dataclass(eq=False)
class BatchCutter:
    """Cuts the batches of one step. `synchronous`: replicas wait for each other in every step."""

    options: StepOptions
    mesh: InitVar[Mesh]
    device: torch.device
    seed: int
    forward: ForwardSignature
    count: Count | None = None
    synchronous: bool = True
    reverses: bool = False  # whether samples are reversed, which changes rounding only
    widens: bool = False  # whether floating-point numbers become float64

    def __post_init__(self, mesh: Mesh) -> None:
        self.group = mesh.data  # whose ranks have different rows
        self.copies = mesh.cp.size  # workers that have the same rows
        self.regroup()

    def regroup(self) -> None:
        """Count the micro-batches of this replica among those that there are now."""
        self.local_microbatches = self.options.local_microbatches(self.group.size, self.group.rank)

    @property
    def missing_microbatches(self) -> float:
        """How many fewer than another replica, for each that is computed here; exact only."""
        if not self.options.exact:
            return 0.0
        most = -(-self.options.microbatches // self.group.size)
        return most / self.local_microbatches - 1

    @property
    def cuts(self) -> bool:
        """Whether a batch has several parts, whose losses are averaged."""
        return self.group.size * self.local_microbatches > 1

    def cut(self, batch: Any, known: AnyBatch | None, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of this replica; `known` is the batch of `job.batches` it came from."""
        if not isinstance(batch, FullDatasetBatch):
            return self._cut_rows(batch, known, step)
        if self.count is not None:
            raise BadInput(
                "count needs to see a batch before its gradients, and mapreduce's batch is the "
                'whole dataset: use mapreduce(batch="mini")'
            )
        return LazyMicroBatches(self._generate(batch, step), len(batch.microbatch_sizes))

    def _generate(self, dataset: FullDatasetBatch, step: int) -> Iterator[MicroBatch]:
        done = 0
        for minibatch in dataset.minibatches:
            fraction = minibatch.total / dataset.total
            for micro in self._cut_rows(minibatch, minibatch, step, done):
                assert isinstance(micro.weight, float)
                yield micro._replace(weight=micro.weight * fraction)
                done += 1

    def _cut_rows(
        self, batch: Any, known: AnyBatch | None, step: int, first: int = 0
    ) -> list[MicroBatch]:
        part = batch if isinstance(batch, (Batch, DictBatch)) else None
        if known is not None and known.given is batch:
            part = known  # else the script has made another one of it
        content = batch if part is None else part.content
        if part is not None and self.local_microbatches == 1 < len(part.microbatch_sizes):
            part = _in_one(part)
            content = part.content
        is_whole = part is not None and len(part.microbatch_sizes) == self.local_microbatches == 1
        if part is not None and is_whole and self.count is None:
            size = part.microbatch_sizes[0]
            [weight] = self._weights([float(size)], part.total, part.concurrent)
            seed = self._seed_of(step, first)
            return [self._microbatch(content, size, weight, size == 0, seed)]
        ranges, sizes = self._layout(content, part, known)
        pieces = [content]
        if len(ranges) > 1:
            pieces = [take_rows(content, [r], ranges[-1].stop) for r in ranges]
        counts: Sequence[float] = sizes  # what the loss of each is a mean over, on this rank
        if (count_of := self.count) is not None:
            pairs = zip(pieces, sizes, strict=True)
            counts = [float(count_of(piece)) if size else 0.0 for piece, size in pairs]
        total = None if part is None else part.total
        concurrent = 1 if known is None else known.concurrent
        weights = self._weights(counts, total, concurrent)
        return [
            self._microbatch(piece, size, weight, count == 0, self._seed_of(step, first + m))
            for m, (piece, size, count, weight) in enumerate(
                zip(pieces, sizes, counts, weights, strict=True)
            )
        ]

    def _microbatch(
        self, rows: Tree, size: int, weight: Weight, weightless: bool, seed: int
    ) -> MicroBatch:
        samples = max(1, size)
        inputs, targets = self.forward.arguments(self.place(rows, samples), samples)
        has_samples = size > 0
        skips = self.group.size == 1 and not self.options.exact and not has_samples
        return MicroBatch(inputs, targets, weight, has_samples, weightless, skips, seed)

    def place(self, content: Tree, samples: int) -> Tree:
        """A batch of so many samples on the device, as `shoal verify` wants it."""
        moved = move_to(content, self.device)
        ordered = reverse_rows(moved, samples) if self.reverses else moved
        return widen(ordered) if self.widens else ordered

    def _layout(
        self, content: Any, part: AnyBatch | None, known: AnyBatch | None
    ) -> tuple[list[range], Sequence[int]]:
        """Rows and samples of each micro-batch. A script may pass what it made of a batch.

        With the same number of rows it is cut like the batch that it came from.
        """
        if part is not None and len(part.microbatch_sizes) == self.local_microbatches == 1:
            return [range(part.rows)], part.microbatch_sizes
        rows = num_rows(content) if part is None else part.rows
        if known is not None and len(known.microbatch_sizes) == self.local_microbatches:
            ends = list(itertools.accumulate(max(1, size) for size in known.microbatch_sizes))
            if ends[-1] == rows:
                return list(map(range, [0, *ends[:-1]], ends)), known.microbatch_sizes
        ranges = BatchSplit(microbatches=self.local_microbatches).rows(rows)
        return ranges, [len(r) for r in ranges]

    def _weights(
        self, counts: Sequence[float], total: int | None, concurrent: int
    ) -> Sequence[Weight]:
        """Each micro-batch's share: its count over the count of the global batch.

        Workers that have the same rows divide their share between them.
        If the global count is not known, ranks sum it up while forward runs, unless there is one.
        Ranks that do not wait for each other assume that all have the same count.
        """
        local = float(sum(counts))
        counts = [count / self.copies for count in counts]
        if self.count is None and total is not None:
            return [count / total for count in counts]
        if not self.synchronous or self.group.size == 1:
            estimate = max(local, _SMALLEST_COUNT) * self.group.size / concurrent
            return [count / estimate for count in counts]
        total_count = torch.tensor(local, dtype=torch.float64).to(self.device)
        work = self.group.all_reduce(total_count, Op.SUM)

        def weight_of(count: float) -> Tensor:
            work.wait()
            return count / total_count.clamp(min=_SMALLEST_COUNT)

        return [partial(weight_of, count) for count in counts]

    def _seed_of(self, step: int, m: int) -> int:
        """The seed of a micro-batch's random stream; by its index in the batch when exact."""
        if self.options.exact:
            start, _ = runs_of(self.options.microbatches, self.group.size)[self.group.rank]
            return mix(self.seed, 2, step, start + m)
        return mix(self.seed, 3, step, self.group.rank, m)
