"""Collectives of any torch.distributed process group: Gloo, MPI; NCCL in `nccl.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.call import TORCH_OPS, Call, Op, as_reduced, divide, fill_identity
from shoal.comm.executor import Executor
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, widened
from shoal.comm.transport.transport import TorchWork, Work, as_shoal_error
from shoal.errors import BadInput

# a torch work, and what is to be done when it has ended
Started = tuple[Any, Callable[[], None]]


class Torch(Executor):
    """The collectives of a process group. `rank` and `size` count inside the group."""

    over = ""  # in sentences that name an operation

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._calls = 0
        self._timed = False

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        flat = FlatTensor(data, host=self._is_staged(data)).flat
        start = partial(dist.isend, flat, group=self._group, group_dst=dst, tag=tag)
        return self._begin("send", lambda: (start(), _in_turn))

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        target = FlatTensor(into, host=self._is_staged(into))
        start = partial(dist.irecv, target.flat, group=self._group, group_src=src, tag=tag)
        return self._begin("receive", lambda: (start(), target.store))

    def submit(self, call: Call) -> Work:
        if call.kind == "all_to_all_uneven":
            self._agree_about_counts(call)
        wide, store = widened(call, self.rank)

        def begin() -> Started:
            work, finish = self._start(wide)
            return work, finish if wide is call else partial(_in_turn, finish, store)

        return self._begin(call.kind, begin, call.timeout_s, self._of(call))

    def split(self, ranks: Sequence[int]) -> Torch | None:
        """Ranks in ascending order, as torch keeps them."""
        group = self._split_group(ranks)
        return None if group is None else Torch(group)

    def _split_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
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
        return group if self.rank in ranks else None

    def record_times(self) -> None:
        self._timed = True

    def _begin(
        self,
        name: str,
        start: Callable[[], Started],
        timeout_s: float | None = None,
        of: str = "",
    ) -> TorchWork:
        doing = self._numbered(name, of)
        start_ns = time.monotonic_ns() if self._timed else 0
        try:
            started, finish = start()
        except RuntimeError as error:
            raise as_shoal_error(error, self.rank, doing) from error
        work = TorchWork(started, self.rank, None, doing, finish, timeout_s)
        if self._timed:
            work.time_from(start_ns)
        return work

    def _numbered(self, name: str, of: str) -> str:
        self._calls += 1
        return f"{name} #{self._calls}{of}{self.over}"

    def _of(self, call: Call) -> str:
        """How much, where errors say it."""
        return ""

    def _is_staged(self, data: Tensor) -> bool:
        """Gloo sends no messages from the memory of a GPU: they go through the host's."""
        return data.is_cuda and dist.get_backend(self._group) == "gloo"

    def _start(self, call: Call) -> Started:
        """The torch work of a call, on flat tensors."""
        if call.kind == "barrier":
            return dist.barrier(self._group, async_op=True), _in_turn
        is_swap = call.kind.startswith("all_to_all")
        in_place = call.out is call.data
        source = None if call.data is None else FlatTensor(call.data, copy=is_swap and in_place)
        target = source
        if is_swap or not in_place:
            target = None if call.out is None else FlatTensor(call.out)
        given: Any = None if source is None else source.flat
        taken: Any = None if target is None else target.flat
        finish = _in_turn if target is None else target.store
        options: Any = {"group": self._group, "async_op": True}
        match call.kind:
            case "broadcast":
                return dist.broadcast(taken, group_src=call.root, **options), finish
            case "gather":
                return dist.gather(
                    given, self._rows(target), group_dst=call.root, **options
                ), finish
            case "scatter":
                return dist.scatter(
                    taken, self._rows(source), group_src=call.root, **options
                ), finish
            case "all_gather":
                return dist.all_gather_into_tensor(taken, given, **options), finish
            case "all_to_all" | "all_to_all_uneven":
                return dist.all_to_all_single(
                    taken,
                    given,
                    list(call.recv_counts) or None,
                    list(call.send_counts) or None,
                    **options,
                ), finish
            case "scan" | "exclusive_scan":
                everything = given.new_empty(self.size, given.numel())
                work = dist.all_gather_into_tensor(everything.view(-1), given, **options)
                rows = everything[: self.rank + (call.kind == "scan")]
                return work, partial(_in_turn, partial(combine_rows, taken, rows, call.op), finish)
        return self._reduce(call, given, taken, finish)

    def _rows(self, operand: FlatTensor | None) -> Any:
        return None if operand is None else list(operand.rows(self.size))

    def _reduce(
        self, call: Call, given: Tensor, taken: Tensor, finish: Callable[[], None]
    ) -> Started:
        numbers, op = as_reduced(taken, call.op)
        options: Any = {"op": TORCH_OPS[op], "group": self._group, "async_op": True}
        if call.kind == "reduce_scatter":
            work = dist.reduce_scatter_tensor(numbers, as_reduced(given, call.op)[0], **options)
        elif call.kind == "reduce":
            work = dist.reduce(numbers, group_dst=call.root, **options)
        else:
            if given is not taken:
                taken.copy_(given)
            work = dist.all_reduce(numbers, **options)
        if op is Op.MEAN:
            finish = partial(_in_turn, partial(divide, numbers, self.size), finish)
        return work, finish

    def _agree_about_counts(self, call: Call) -> None:
        counts = counts_table(self.size)
        said = Call("all_gather", counts_row(call), counts, timeout_s=call.timeout_s)
        self.submit(said).wait()
        check_counts(counts)


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
