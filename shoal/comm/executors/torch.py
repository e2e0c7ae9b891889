"""A group over any torch.distributed process group: Gloo, NCCL, MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as meet

from shoal.comm.group import Group, Op, check_subgroup
from shoal.errors import BadInput, PeerLost, ShoalError, tells_of_lost_peer
from shoal.observe.trace import OFF, Tracer
from shoal.transport.transport import Work

_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MEAN: dist.ReduceOp.SUM,  # Gloo has no average: divided when the work is done
    Op.MAX: dist.ReduceOp.MAX,
    Op.MIN: dist.ReduceOp.MIN,
    Op.PROD: dist.ReduceOp.PRODUCT,
}


class TorchWork:
    """Waits for a torch work; a lost connection becomes a `PeerLost` that says what broke."""

    def __init__(
        self,
        work: Any,
        rank: int,
        doing: str,
        finish: Callable[[], None] | None = None,
        tracer: Tracer = OFF,
    ):
        self._work = work
        self._rank = rank
        self._doing = doing
        self._finish = finish
        self._tracer = tracer

    def wait(self) -> None:
        if self._work is not None:
            try:
                with self._tracer.span("wait", self._doing):
                    self._work.wait()
            except RuntimeError as error:
                raise told(error, self._rank, self._doing) from error
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()


class TorchGroup:
    """The collectives of a process group. `rank` and `size` count inside the group."""

    def __init__(self, group: dist.ProcessGroup, tracer: Tracer = OFF):
        self._group = group
        self.tracer = tracer
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._calls = 0

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        sent = data.cpu() if self._is_staged(data) else data
        return self._start(
            "send", data, lambda: dist.isend(sent, group=self._group, group_dst=dst, tag=tag)
        )

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        landing = torch.empty_like(into, device="cpu") if self._is_staged(into) else into

        def finish() -> None:
            into.copy_(landing)

        return self._start(
            "receive",
            into,
            lambda: dist.irecv(landing, group=self._group, group_src=src, tag=tag),
            None if landing is into else finish,
        )

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        return self._start(
            "broadcast",
            data,
            lambda: dist.broadcast(data, group=self._group, group_src=root, async_op=True),
        )

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        return self._start(
            "reduce",
            data,
            lambda: dist.reduce(
                data, op=_OPS[op], group=self._group, group_dst=root, async_op=True
            ),
            self._mean(data, op),
        )

    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._start(
            "all_reduce",
            data,
            lambda: dist.all_reduce(data, op=_OPS[op], group=self._group, async_op=True),
            self._mean(data, op),
        )

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        pieces = None if self.rank != root or out is None else self._pieces(out)
        return self._start(
            "gather",
            data,
            lambda: dist.gather(
                data.flatten(), pieces, group=self._group, group_dst=root, async_op=True
            ),
        )

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        pieces = None if self.rank != root or data is None else self._pieces(data)
        return self._start(
            "scatter",
            out,
            lambda: dist.scatter(
                out.view(-1), pieces, group=self._group, group_src=root, async_op=True
            ),
        )

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        return self._start(
            "all_gather",
            out,
            lambda: dist.all_gather(
                self._pieces(out), data.flatten(), group=self._group, async_op=True
            ),
        )

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._start(
            "reduce_scatter",
            data,
            lambda: dist.reduce_scatter_tensor(
                out.view(-1), data.flatten(), op=_OPS[op], group=self._group, async_op=True
            ),
            self._mean(out, op),
        )

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        return self._start(
            "all_to_all",
            out,
            lambda: dist.all_to_all_single(
                out.view(-1), data.flatten(), group=self._group, async_op=True
            ),
        )

    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work:
        everything = data.new_empty(self.size, data.numel())

        def finish() -> None:
            total = everything[0]
            for rank in range(1, self.rank + 1):
                op.combine(total, everything[rank])
            data.copy_((total / (self.rank + 1) if op is Op.MEAN else total).view(data.shape))

        gathered = self.all_gather(everything.view(-1), data)
        return TorchWork(gathered, self.rank, "scan", finish)

    def barrier(self) -> Work:
        return self._start("barrier", None, lambda: dist.barrier(self._group, async_op=True))

    def duplicate(self) -> Group:
        found = self.subgroup(range(self.size))
        assert found is not None
        return found

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Ranks in ascending order, as torch keeps them."""
        check_subgroup(ranks, self.size)
        if list(ranks) != sorted(ranks):
            raise BadInput(f"torch orders the ranks of a group: name them in order, not {ranks}")
        everybody = dist.get_process_group_ranks(self._group)
        # torch numbers groups in each process: either all processes make a group, or (with a name
        # from its ranks) its members do, who then must have made equally many before
        alone = len(everybody) < dist.get_world_size()
        if alone and len(ranks) < self.size:
            raise BadInput("over torch.distributed a group is cut out of the whole world")
        group = dist.new_group(
            [everybody[rank] for rank in ranks],
            backend=dist.get_backend(self._group),
            use_local_synchronization=alone,
        )
        return TorchGroup(group, self.tracer) if self.rank in ranks else None

    def _is_staged(self, data: Tensor) -> bool:
        """Gloo sends no messages from the memory of a GPU: they go by way of the host's."""
        return data.is_cuda and dist.get_backend(self._group) == "gloo"

    def _pieces(self, data: Tensor) -> list[Tensor]:
        return list(data.view(self.size, -1))

    def _mean(self, data: Tensor, op: Op) -> Callable[[], None] | None:
        def divide() -> None:
            data.div_(self.size)

        return divide if op is Op.MEAN else None

    def _start(
        self,
        name: str,
        data: Tensor | None,
        call: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        self._calls += 1
        doing = f"{name} #{self._calls}"
        start_ns = time.monotonic_ns() if self.tracer.enabled else 0
        try:
            work = call()
        except RuntimeError as error:
            raise told(error, self.rank, doing) from error
        if self.tracer.enabled and work is not None:
            self._trace(work, name, start_ns, data)
        return TorchWork(work, self.rank, doing, finish, self.tracer)

    def _trace(self, work: Any, name: str, start_ns: int, data: Tensor | None) -> None:
        kind = name if name in ("send", "receive") else "reduce"
        size = 0 if data is None else data.numel() * data.element_size()

        def done(_: Any) -> None:
            self.tracer.add(kind, start_ns, time.monotonic_ns(), "comm", f"{name} {size} bytes")

        # some works (point to point over Gloo) carry no future; they are then timed by `wait` spans
        try:
            work.get_future().add_done_callback(done)
        except RuntimeError:
            return


def told(error: RuntimeError, rank: int, doing: str) -> ShoalError:
    """torch's word for it, as ours: who, doing what."""
    if tells_of_lost_peer(str(error)):
        return PeerLost(rank, None, f"{doing} ({_first_line(error)})")
    return ShoalError(f"rank {rank} failed in {doing}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def join_world(
    rendezvous: str, rank: int, size: int, backend: str, name: str = "shoal"
) -> dist.ProcessGroup:
    """Make (or take, if the script made one) the default process group of this process.

    A process may join several worlds one after the other at the same rendezvous: `name` keeps
    what they leave in its store apart.
    """
    if not dist.is_initialized():
        store, rank, size = next(meet(rendezvous, rank, size))
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            device_id=device,
        )
    world = dist.group.WORLD
    assert world is not None
    return world
