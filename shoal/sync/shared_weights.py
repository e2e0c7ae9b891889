"""One copy of the weights a host, which each of its workers updates a slice of.

    backward   leaves each worker's gradients where they are, and tells where that is
    sum        a worker that is done adds up blocks of what all have told, until none is left
    barrier    all sums are there, and no worker reads weights any more
    hosts      several of them: slice r is all-reduced among the workers r of all hosts
    update     of slice r of the weights, with an optimizer of that slice: 1/n of state and time
    barrier    all weights are new; nothing is gathered

So do ddp, zero(1), zero(2), mapreduce, and gossip where all weights are equal: they differ in who
adds up, updates and keeps state, and here it is the owner of a slice.

The model of a worker maps the weights privately (copy on write): what a script writes into it
between two steps, such as weights that it clips or an average that it evaluates with, stays this
worker's own, as it would be in memory of its own. Pages that were written are found before the
update (`/proc/self/pagemap`): the owner of a slice takes its own values over, and afterwards the
pages are given back, so that the worker sees the host's weights again.
"""

from __future__ import annotations

import copy
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.objects import all_gather_bytes
from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.replica.optimizers import PARAM_KEYS, like
from shoal.replica.peer_sum import PeerSum
from shoal.replica.split.shard import ReplicaGradNorm, ReplicaShard
from shoal.runtime.memory_limit import cores
from shoal.sync import Replica, StepTraffic, Sync
from shoal.sync.optimizer_step import GradNorm
from shoal.sync.replica_mean import averaged
from shoal.sync.shared_host import HostGroup, HostMemory, share

_PATIENCE_NS = 20_000_000  # of a worker that has nothing to compute, on cores of its own


class Piece(NamedTuple):
    """The part of a parameter in the slice of this worker: its elements in the flat buffer."""

    number: int
    where: slice
    parameter: nn.Parameter


def build_shared(
    replica: Replica, buckets: list[slice], wanted: bool | None
) -> SharedWeights | None:
    """None on all ranks, where weights are not shared."""
    shared = share(replica, buckets, wanted)
    return None if shared is None else SharedWeights(replica, *shared)


class SlicedGradNorm(ReplicaGradNorm):
    """Of a replica that is split, where workers have slices of its gradients, too."""

    def __init__(self, shard: ReplicaShard, squares: Callable[[], dict[nn.Parameter, Tensor]]):
        super().__init__(shard, None)
        self._squares = squares

    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        return self.of({p: square.sqrt() for p, square in self._squares().items()})


class SharedWeights(Sync):
    """See above. `update.optimizer` has the settings, and the state where it is saved or loaded;
    `_optimizer` updates the slice.
    """

    traffic: StepTraffic

    def __init__(self, replica: Replica, host: HostGroup, shared: HostMemory):
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self.statistics = replica.statistics
        self.about: dict[str, Any] = {}  # what a strategy reports besides traffic
        self.traffic = StepTraffic()
        self.traffic.count(flat, replica.group)
        self.group = host.local.counted(self.traffic)
        self._across = host.across and host.across.counted(self.traffic)
        self._pages = shared.pages
        memory = shared.memory
        weights_at = shared.weights_at
        self._weights = flat.numbers_in(memory, weights_at)
        self._sums = flat.numbers_in(memory, weights_at + len(shared.pages.memory))
        runs = iter(flat.grads.runs())
        in_buckets = [
            list(itertools.islice(runs, len(flat.grads.tensors[b.start])))
            for b in flat.grads.buckets
        ]
        count = PeerSum.table_bytes(self.group.size, sum(map(len, in_buckets))) // 8
        table = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=mmap.PAGESIZE)
        self._peers = PeerSum(shared.pids, self.group.rank, in_buckets, table)
        is_crowded = self.group.size * torch.get_num_threads() > cores()
        self._patience_ns = 0 if is_crowded else _PATIENCE_NS
        if self.group.rank == 0:
            self._weights.copy_(flat.data)
        self.group.barrier().wait()
        flat.move_to(flat.numbers_in(shared.pages.memory))
        self._slice = flat.equal_slices(self.group.size)[self.group.rank]
        self._sum = self._sums[self._slice]
        self._head = torch.zeros(flat.header_size, dtype=flat.dtype)
        self._pieces = list(_pieces_of(flat, self._weights, self._slice))
        self._by_parameter = {id(flat.params[p.number]): p.parameter for p in self._pieces}
        self._optimizer = self._of_slice()
        self._was_written = False
        self.update.optimizer.state.clear()  # Adagrad has made some
        self.update.grad_norm = (
            GradNorm(over_shards=self._over_slices)
            if replica.copies is None
            else GradNorm(over_replica=SlicedGradNorm(replica.copies, self._squares))
        )

    def _of_slice(self) -> torch.optim.Optimizer:
        """An optimizer of the pieces, in the groups that the script has made of the parameters."""
        groups = [
            {
                **{k: v for k, v in group.items() if k not in PARAM_KEYS},
                "params": [
                    self._by_parameter[id(p)]
                    for p in group["params"]
                    if id(p) in self._by_parameter
                ],
            }
            for group in self.update.optimizer.param_groups
        ]
        made: torch.optim.Optimizer = like(self.update.optimizer, groups)
        return made

    def _over_slices(self, squares: Tensor) -> Tensor:
        self.group.all_reduce(squares).wait()
        return squares

    def _squares(self) -> dict[nn.Parameter, Tensor]:
        """Of each parameter the sum of squares of its gradient, from those of its pieces."""
        squares = torch.zeros(len(self.flat.params), dtype=torch.float64)
        for index, _, parameter in self._pieces:
            if parameter.grad is not None:
                squares[index] = parameter.grad.norm().double().square()
        return dict(zip(self.flat.params, self._over_slices(squares), strict=True))

    # ------------------------------------------------------------------ one step

    def finish(self) -> None:
        self.collect()
        with self._slice_is_updated():
            self.update.apply()
        for piece in self._pieces:
            piece.parameter.grad = None
        self.group.barrier().wait()
        if self._was_written:
            self._pages.give_back()
        self.flat.zero_grad()

    def reduce(self, bucket: slice) -> None:
        self._peers.tell(self.flat.grads.tensors[bucket.start])

    def collect(self) -> None:
        """The gradients of this slice, over all ranks; then a script's own values count."""
        self._was_written = self._pages.are_written()  # while others still compute
        all_have_told = self.group.barrier()
        for bucket, where in self._peers.blocks():
            if not self._peers.has(bucket, self._patience_ns):
                all_have_told.wait()
            self._add_up(where)
        all_have_told.wait()
        self.group.barrier().wait()
        self._peers.begin()
        self._head.copy_(self._sums[: self.flat.header_size])
        if self._across is not None:
            for work in [self._across.all_reduce(each) for each in (self._head, self._sum)]:
                work.wait()
        has_gradient = self._head[1:].tolist()
        for index, where, parameter in self._pieces:
            start = self._slice.start
            grad = self._sum[where.start - start : where.stop - start]
            parameter.grad = grad if has_gradient[index] > 0 else None
        if self._was_written:
            self._weights[self._slice].copy_(self.flat.data[self._slice])
        self.traffic.steps += 1
        self.traffic.total += self._sum.nbytes * (self.group.size - 1)

    def _add_up(self, where: slice) -> None:
        error, lost = self._peers.add(where, self._sums[where])
        if error:
            self.group.barrier().wait()  # it names a worker that was lost
            raise ShoalError(
                f"rank {self.group.rank} cannot read the gradients of rank {lost}: "
                f"{os.strerror(error)}; give the strategy shared_weights=False"
            )

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._head[0].clone()

    @contextmanager
    def _slice_is_updated(self) -> Iterator[None]:
        update = self.update
        whole = update.optimizer
        params = update.params
        update.take_settings(update.steps)
        for group, of_slice in zip(whole.param_groups, self._optimizer.param_groups, strict=True):
            of_slice |= {k: v for k, v in group.items() if k not in PARAM_KEYS}
        update.optimizer = self._optimizer
        update.params = [piece.parameter for piece in self._pieces]
        try:
            yield
        finally:
            update.optimizer = whole
            update.params = params

    # ------------------------------------------------------------------ checkpoints

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with self.traffic.uncounted(), averaged(self.statistics, self.group):
            if optimizer:
                self._give_state()
            try:
                yield
            finally:
                if optimizer:
                    self.update.optimizer.state.clear()

    def _give_state(self) -> None:
        """On rank 0 the state of all slices, as that of an optimizer of whole parameters."""
        for name in self._state_names():
            is_number = name.endswith("()")
            key = name.removesuffix("()")
            size = len(self.flat.params) if is_number else self.flat.size
            values = torch.zeros(2, size, dtype=torch.float64 if is_number else self.flat.dtype)
            for index, where, parameter in self._pieces:
                state = self._optimizer.state.get(parameter, {})
                is_first = where.start == self.flat.ranges[index].start
                if key in state and (is_first or not is_number):
                    at = slice(index, index + 1) if is_number else where
                    values[0, at] = torch.as_tensor(state[key]).reshape(-1)
                    values[1, at] = 1
            self.group.all_reduce(values.view(-1)).wait()
            if self.group.rank == 0:
                self._take_whole(key, values, is_number)

    def _take_whole(self, key: str, values: Tensor, is_number: bool) -> None:
        for index, p in enumerate(self.flat.params):
            start = index if is_number else self.flat.ranges[index].start
            if values[1, start]:
                of_p = (
                    values[0, start].float() if is_number else self.flat.view(index, values[0], 0)
                )
                self.update.optimizer.state.setdefault(p, {})[key] = of_p.clone()

    def _state_names(self) -> list[str]:
        """Of all ranks; behind those of single numbers stands "()"."""
        own = {
            key if _has_elements(value) else f"{key}()"
            for state in self._optimizer.state.values()
            for key, value in state.items()
            if value is not None
        }
        told = all_gather_bytes(self.group, "\n".join(sorted(own)).encode())
        return sorted({name for text in told for name in text.decode().split("\n") if name})

    def after_load(self) -> None:
        """Each rank has loaded all of it: the state of its slice is taken from there."""
        whole = self.update.optimizer.state
        self._optimizer = self._of_slice()
        for index, where, parameter in self._pieces:
            start = self.flat.ranges[index].start
            piece = slice(where.start - start, where.stop - start)
            if state := whole.get(self.flat.params[index]):
                self._optimizer.state[parameter] = {
                    key: value.reshape(-1)[piece].clone() if _has_elements(value) else value
                    for key, value in copy.deepcopy(state).items()
                }
        whole.clear()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer]

    def elsewhere(self) -> list[Tensor]:
        own = self._slice
        weights = self.flat.data
        sums = [self._sums[: own.start], self._sums[own.stop :]]
        return [weights[: own.start], weights[own.stop :], self._weights, *sums]

    def report(self) -> dict[str, Any]:
        return {**self.about, **self.traffic.report()}

    def close(self) -> None:
        self._pages.close()


def _has_elements(value: object) -> bool:
    """Whether a state has a number for each element; else it is a count of steps, or a setting."""
    return isinstance(value, Tensor) and value.dim() > 0


def _pieces_of(flat: FlatParams, weights: Tensor, part: slice) -> Iterator[Piece]:
    for index, span in enumerate(flat.ranges):
        where = slice(max(span.start, part.start), min(span.stop, part.stop))
        if where.start < where.stop:
            yield Piece(index, where, nn.Parameter(weights[where]))
