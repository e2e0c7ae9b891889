"""Nine processes that are one Gloo world, and smaller worlds as groups of it.

They are started once. Each one takes a case from its pipe, runs it on 1 to 9 ranks, holds the
result against torch.distributed's own (or the expected numbers, where torch has no such
operation), and answers with None or with what was wrong.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.transport.torch_p2p import TorchTransport
from tests.comm.cases import DTYPES, Case, call, check, combined, given_to, group_for, widened

SIZE = 9
_PATIENCE_S = 90
_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class GlooWorld:
    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [context.Pipe() for _ in range(SIZE)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=serve, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def check(self, case: Case) -> None:
        for pipe in self._pipes:
            pipe.send(case)
        silent = f"no answer from one of the ranks for {case}"
        late = time.monotonic() + _PATIENCE_S
        answers = [
            pipe.recv() if pipe.poll(max(0.0, late - time.monotonic())) else silent
            for pipe in self._pipes
        ]
        wrong = sorted((answer for answer in answers if answer is not None), key=silent.__eq__)
        assert not wrong, wrong[0]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=60),
    )
    worlds = {size: dist.new_group(list(range(size))) for size in range(1, SIZE + 1)}
    while (case := pipe.recv()) is not None:
        try:
            for size in range(rank + 1, SIZE + 1):
                _check_on(worlds[size], case)
        except BaseException:
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)
    dist.destroy_process_group()


def _check_on(world: dist.ProcessGroup, case: Case) -> None:
    transport = TorchTransport(world)
    rank = transport.rank
    size = transport.size
    got = call(group_for(transport, case), case)
    check(case, got, rank, size)
    if (peer := _torch_result(world, case, rank, size)) is not None:
        _compare(case, got, peer, size)


def _compare(case: Case, got: Tensor, peer: Tensor, size: int) -> None:
    """Exactly for integers and for what is only copied; within rounding for float sums."""
    if not DTYPES[case.dtype].is_floating_point:
        assert torch.equal(got, peer), f"{got}, and torch.distributed says {peer}"
        return
    slack = torch.zeros(())
    if case.kind in ("reduce", "all_reduce", "reduce_scatter"):
        given = [widened(given_to(case, rank, size)) for rank in range(size)]
        slack = combined([value.abs().amax() for value in given], case)[1]
    off = (widened(got) - widened(peer)).abs()
    assert bool((off <= 2 * slack).all()), f"{got}, and torch.distributed says {peer}"


def _torch_result(world: dist.ProcessGroup, case: Case, rank: int, size: int) -> Tensor | None:
    """What torch.distributed makes of the same input; None where it has no such operation."""
    root = case.root % size
    op = _TORCH_OPS.get(case.op)
    data = given_to(case, rank, size)
    if not data.numel():
        return None
    if case.kind == "broadcast":
        dist.broadcast(data, group=world, group_src=root)
        return data
    if case.kind == "all_gather":
        parts = [torch.empty_like(data) for _ in range(size)]
        dist.all_gather(parts, data, group=world)
        return torch.stack(parts)
    if case.kind == "gather":
        parts = [torch.empty_like(data) for _ in range(size)]
        dist.gather(data, parts if rank == root else None, group=world, group_dst=root)
        return torch.stack(parts) if rank == root else None
    if case.kind == "scatter":
        out = torch.empty_like(data[0])
        pieces = list(data) if rank == root else None
        dist.scatter(out, pieces, group=world, group_src=root)
        return out
    if case.kind == "all_to_all":
        out = torch.empty_like(data)
        dist.all_to_all_single(out, data, group=world)
        return out
    if op is None or case.dtype == "bool":
        return None
    if case.kind == "all_reduce":
        dist.all_reduce(data, op, group=world)
        return data
    if case.kind == "reduce":
        dist.reduce(data, op=op, group=world, group_dst=root)
        return data if rank == root else None
    if case.kind == "reduce_scatter":
        out = torch.empty_like(data[0]).view(-1)
        dist.reduce_scatter_tensor(out, data.view(-1), op, group=world)
        return out.view(data[0].shape)
    return None
