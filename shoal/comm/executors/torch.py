"""Collectives of any torch.distributed process group: Gloo, NCCL, MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.call import TORCH_OPS, Call, Op, Operand, as_reduced, divide, fill_identity
from shoal.comm.executor import Executor
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, widened
from shoal.errors import BadInput, PeerLost, ShoalError, tells_of_lost_peer
from shoal.runtime.waits import waiting
from shoal.transport.transport import Work


class ProcessGroupWork:
    """Waits for a torch work; a lost connection becomes a `PeerLost` that names the operation."""

    def __init__(
        self,
        work: Any,
        rank: int,
        doing: str,
        finish: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ):
        self._work = work
        self._rank = rank
        self._doing = doing
        self._finish = finish
        self._timeout_s = timeout_s
        self.times: tuple[int, int] | None = None

    def wait(self) -> None:
        if self._work is not None:
            try:
                with waiting(f"rank {self._rank}", "the other ranks", self._doing):
                    self._wait()
            except RuntimeError as error:
                raise as_shoal_error(error, self._rank, self._doing) from error
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()

    def _wait(self) -> None:
        if self._timeout_s is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=self._timeout_s))

    def time_from(self, start_ns: int) -> None:
        """Note the times when torch tells of the end; some works carry no future for it."""

        def done(_: Any) -> None:
            self.times = (start_ns, time.monotonic_ns())

        try:
            self._work.get_future().add_done_callback(done)
        except (AttributeError, RuntimeError):
            return


# a torch work, and what is to be done when it has ended
Started = tuple[Any, Callable[[], None] | None]


class Torch(Executor):
    """The collectives of a process group. `rank` and `size` count inside the group."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._calls = 0
        self._timed = False

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        flat = FlatTensor(data, host=self._is_staged(data)).flat
        start = partial(dist.isend, flat, group=self._group, group_dst=dst, tag=tag)
        return self._begin("send", lambda: (start(), None))

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        target = FlatTensor(into, host=self._is_staged(into))
        start = partial(dist.irecv, target.flat, group=self._group, group_src=src, tag=tag)
        return self._begin("receive", lambda: (start(), target.store))

    def submit(self, call: Call) -> Work:
        if call.kind == "all_to_all_uneven":
            self._agree_about_counts(call)
        wide, store = widened(call, self.rank)

        def begin() -> Started:
            work, finish = getattr(self, f"_{call.kind}")(wide)
            return work, finish if wide is call else partial(_in_turn, finish, store)

        return self._begin(call.kind, begin, call.timeout_s)

    def split(self, ranks: Sequence[int]) -> Torch | None:
        """Ranks in ascending order, as torch keeps them."""
        if list(ranks) != sorted(ranks):
            raise BadInput(f"torch orders the ranks of a group: name them in order, not {ranks}")
        world_ranks = dist.get_process_group_ranks(self._group)
        # torch numbers groups in each process: either all processes make a group, or (with a name
        # from its ranks) its members do, which then must have made equally many before
        alone = len(world_ranks) < dist.get_world_size()
        if alone and len(ranks) < self.size:
            raise BadInput("over torch.distributed a group is cut out of the whole world")
        group = dist.new_group(
            [world_ranks[rank] for rank in ranks],
            backend=dist.get_backend(self._group),
            use_local_synchronization=alone,
        )
        return Torch(group) if self.rank in ranks else None

    def record_times(self) -> None:
        self._timed = True

    def _begin(
        self, name: str, start: Callable[[], Started], timeout_s: float | None = None
    ) -> Work:
        self._calls += 1
        doing = f"{name} #{self._calls}"
        start_ns = time.monotonic_ns() if self._timed else 0
        try:
            started, finish = start()
        except RuntimeError as error:
            raise as_shoal_error(error, self.rank, doing) from error
        work = ProcessGroupWork(started, self.rank, doing, finish, timeout_s)
        if self._timed:
            work.time_from(start_ns)
        return work

    def _is_staged(self, data: Tensor) -> bool:
        """Gloo sends no messages from the memory of a GPU: they go through the host's."""
        return data.is_cuda and dist.get_backend(self._group) == "gloo"

    # ------------------------------------------------------------------ one method a collective

    def _broadcast(self, call: Call) -> Started:
        target = FlatTensor(_given(call.data))
        work = dist.broadcast(target.flat, group=self._group, group_src=call.root, async_op=True)
        return work, target.store

    def _reduce(self, call: Call) -> Started:
        target = FlatTensor(_given(call.data))
        numbers, op = as_reduced(target.flat, call.op)
        options: Any = {"op": TORCH_OPS[op], "group": self._group, "async_op": True}
        return dist.reduce(numbers, group_dst=call.root, **options), self._end(target, numbers, op)

    def _all_reduce(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        if call.out is not call.data:
            target.flat.copy_(FlatTensor(_given(call.data)).flat)
        numbers, op = as_reduced(target.flat, call.op)
        work = dist.all_reduce(numbers, op=TORCH_OPS[op], group=self._group, async_op=True)
        return work, self._end(target, numbers, op)

    def _gather(self, call: Call) -> Started:
        flat = FlatTensor(_given(call.data)).flat
        target = None if call.out is None else FlatTensor(call.out)
        pieces = None if target is None else list(target.rows(self.size))
        work = dist.gather(flat, pieces, group=self._group, group_dst=call.root, async_op=True)
        return work, None if target is None else target.store

    def _scatter(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        pieces = None if call.data is None else list(FlatTensor(call.data).rows(self.size))
        options: Any = {"group": self._group, "group_src": call.root, "async_op": True}
        return dist.scatter(target.flat, pieces, **options), target.store

    def _all_gather(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        flat = FlatTensor(_given(call.data)).flat
        rows = list(target.rows(self.size))
        return dist.all_gather(rows, flat, group=self._group, async_op=True), target.store

    def _reduce_scatter(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        numbers, op = as_reduced(target.flat, call.op)
        source, _ = as_reduced(FlatTensor(_given(call.data)).flat, call.op)
        options: Any = {"op": TORCH_OPS[op], "group": self._group, "async_op": True}
        work = dist.reduce_scatter_tensor(numbers, source, **options)
        return work, self._end(target, numbers, op)

    def _all_to_all(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        source = FlatTensor(_given(call.data), copy=call.out is call.data).flat
        counts = (list(call.recv_counts) or None, list(call.send_counts) or None)
        options: Any = {"group": self._group, "async_op": True}
        return dist.all_to_all_single(target.flat, source, *counts, **options), target.store

    _all_to_all_uneven = _all_to_all

    def _scan(self, call: Call) -> Started:
        target = FlatTensor(_given(call.out))
        flat = FlatTensor(_given(call.data)).flat
        everything = flat.new_empty(self.size, flat.numel())
        work = dist.all_gather(list(everything), flat, group=self._group, async_op=True)
        last = self.rank + (call.kind == "scan")
        combine = partial(combine_rows, target.flat, everything[:last], call.op)
        return work, partial(_in_turn, combine, target.store)

    _exclusive_scan = _scan

    def _barrier(self, call: Call) -> Started:
        return dist.barrier(self._group, async_op=True), None

    def _agree_about_counts(self, call: Call) -> None:
        assert isinstance(call.data, Tensor)
        device = call.data.device
        counts = counts_table(self.size).to(device)
        said = Call("all_gather", counts_row(call).to(device), counts, timeout_s=call.timeout_s)
        self.submit(said).wait()
        check_counts(counts.cpu())

    def _end(self, target: FlatTensor, numbers: Tensor, op: Op) -> Callable[[], None]:
        if op is not Op.MEAN:
            return target.store
        return partial(_in_turn, partial(divide, numbers, self.size), target.store)


def _given(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def _in_turn(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


def combine_rows(into: Tensor, rows: Tensor, op: Op) -> None:
    """`into` = the rows combined in their order; without rows, the identity."""
    if not len(rows):
        fill_identity(into, op)
        return
    into.copy_(rows[0])
    for row in rows[1:]:
        op.combine(into, row)
    if op is Op.MEAN:
        divide(into, len(rows))


def as_shoal_error(error: RuntimeError, rank: int, doing: str) -> ShoalError:
    """An error of torch as one of ours, which names the rank and the operation."""
    if tells_of_lost_peer(str(error)):
        return PeerLost(rank, None, f"{doing} ({_first_line(error)})")
    return ShoalError(f"rank {rank} failed in {doing}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
