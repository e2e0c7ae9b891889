"""Which samples each replica sees, and when.

The order of samples depends on the seed and the epoch alone. A global batch is cut into
micro-batches first and each micro-batch into the parts of the replicas, so a micro-batch holds
the same samples at any number of replicas:

    rows of a batch      0 1 2 3 4 5 | 6 7 8 9 10 11       2 micro-batches
    replica 0 of 2       0 1 2       | 6 7 8
    replica 1 of 2             3 4 5 |         9 10 11

In exact mode whole micro-batches are dealt out instead, since each one's bits must not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors, tensors_of

Given = TypeVar("Given")


@dataclass(frozen=True)
class Cut:
    """How a replica takes its part of a global batch."""

    replica: int = 0
    replicas: int = 1
    microbatches: int = 1  # of one replica; of the whole batch when exact
    exact: bool = False

    def rows(self, total: int) -> list[range]:
        """The rows of each micro-batch of this replica; a range may be empty."""
        if self.exact:
            mine = _part(range(self.microbatches), self.replica, self.replicas)
            return [_part(range(total), m, self.microbatches) for m in mine]
        whole = (_part(range(total), m, self.microbatches) for m in range(self.microbatches))
        return [_part(micro, self.replica, self.replicas) for micro in whole]


class Batch(tuple[Tree, Tree]):
    """A replica's part of a global batch: `(inputs, targets)`, and what `step` has to know.

    `parts` are the samples in each micro-batch here. Where that is 0 one row stands in, with no
    weight, so that every replica runs the same operations. `of` is above 1 where replicas take
    turns: so many global batches are trained on at a time, and this is one of them as a whole.
    """

    total: int
    parts: tuple[int, ...]
    of: int = 1

    def __new__(cls, inputs: Tree, targets: Tree, total: int, parts: Sequence[int]) -> Batch:
        batch = super().__new__(cls, (inputs, targets))
        batch.total = total
        batch.parts = tuple(parts)
        return batch


class WholeBatch(Batch):
    """A whole dataset as one batch. Its pieces are loaded when they are computed, one at a time."""

    pieces: DatasetBatches

    @classmethod
    def of_pieces(cls, pieces: DatasetBatches) -> WholeBatch:
        batch = tuple.__new__(cls)
        counts = [[len(rows) for rows in cut.rows(len(order))] for order, cut in pieces.batches]
        batch.total = sum(len(order) for order, _ in pieces.batches)
        batch.parts = tuple(itertools.chain(*counts))
        batch.pieces = pieces
        return batch

    def __iter__(self) -> Iterator[Any]:
        raise BadInput(
            "under mapreduce a batch is the whole dataset, which is never in memory at once: pass "
            "it to step as it is and change samples in the dataset or in collate, or take "
            'mapreduce(batch="mini")'
        )

    def __getitem__(self, index: Any) -> Any:
        return iter(self)


def in_turns(batches: Iterable[Given], cut: Cut) -> Iterator[tuple[Given, Cut]]:
    """Of every round of batches, one a replica, the one that is this replica's, as a whole.

    The last round may be short: its batches are cut into parts, so that all replicas have
    equally many.

        batches          0 1 2 3 4 5 6       3 replicas
        replica 1 gets     1     4   part of 6
    """
    source = iter(batches)
    alone = replace(cut, replica=0, replicas=1)
    while batch_round := list(itertools.islice(source, cut.replicas)):
        if len(batch_round) == cut.replicas:
            yield batch_round[cut.replica], alone
        else:
            yield from ((batch, cut) for batch in batch_round)


def permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of samples in an epoch; the same on every rank and at any number of them."""
    generator = torch.Generator().manual_seed(mix(seed, 1, epoch))
    return torch.randperm(num_samples, generator=generator)


def mix(*numbers: int) -> int:
    """One well-spread seed from several small numbers (splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class DatasetBatches:
    """One epoch over a map-style dataset, from batch number `start` on."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        cut: Cut,
        order: Tensor,
        start: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
        loader_seed: int = 0,
        turns: bool = False,
    ):
        self.dataset = dataset
        self.collate = collate
        self.loaders = loaders
        self.loader_seed = loader_seed
        stop = len(order) - len(order) % batch_size if drop_last else len(order)
        batches = [order[i : i + batch_size] for i in range(0, stop, batch_size)][start:]
        self.replicas = cut.replicas
        self.batches = list(in_turns(batches, cut)) if turns else [(b, cut) for b in batches]

    def __iter__(self) -> Iterator[Batch]:
        for (inputs, targets), (rows, cut) in zip(self._load(), self.batches, strict=True):
            parts = [len(r) for r in cut.rows(len(rows))]
            batch = Batch(inputs, targets, len(rows), parts)
            batch.of = self.replicas // cut.replicas
            yield batch

    def _load(self) -> Iterable[tuple[Tree, Tree]]:
        chosen = (take(order, cut.rows(len(order))) for order, cut in self.batches)
        if type(self.dataset) is TensorDataset and self.collate is None:
            return (_pair(tuple(t[i] for t in self.dataset.tensors)) for i in chosen)
        collate = self.collate or default_collate
        if self.loaders:
            loader: DataLoader[Any] = DataLoader(
                self.dataset,
                batch_sampler=[i.tolist() for i in chosen],
                collate_fn=collate,
                num_workers=self.loaders,
                generator=torch.Generator().manual_seed(self.loader_seed),
            )
            return (_pair(batch) for batch in loader)
        return (_pair(collate(self._fetch(i.tolist()))) for i in chosen)

    def _fetch(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[i] for i in indices]


def part_of(batch: Any, cut: Cut) -> Batch:
    """This replica's part of a global batch that somebody else has made."""
    inputs, targets = _pair(batch)
    total = num_rows((inputs, targets))
    ranges = cut.rows(total)
    mine = map_tensors(lambda t: take(t, ranges) if t.dim() else t, (inputs, targets))
    return Batch(mine[0], mine[1], total, [len(r) for r in ranges])


def take(rows: Tensor, ranges: Sequence[range]) -> Tensor:
    """The rows in `ranges`, one after the other; row 0 stands in for an empty range."""
    pieces = [rows[r.start : r.stop] if r else rows[:1] for r in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def num_rows(tree: Tree) -> int:
    """Samples in a batch: the length of its tensors, which must agree."""
    lengths = {len(t) for t in tensors_of(tree) if t.dim() > 0}
    if not lengths:
        raise BadInput("a batch holds no tensor with a dimension for samples")
    if len(lengths) > 1:
        raise BadInput(
            f"the tensors of a batch have different numbers of samples: {sorted(lengths)}"
        )
    return lengths.pop()


def _part(rows: range, index: int, parts: int) -> range:
    n = len(rows)
    return rows[index * n // parts : (index + 1) * n // parts]


def _pair(batch: Any) -> tuple[Tree, Tree]:
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    raise BadInput(
        "a batch has to be a pair (inputs, targets); inputs may be a tensor, a tuple or a dict, "
        f"but this one is a {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
    )
