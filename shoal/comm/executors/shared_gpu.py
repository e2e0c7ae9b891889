"""Collectives of ranks that share one GPU, in its memory (CUDA IPC), without a copy to the host.

    each rank    copies what it gives into memory of its own that the others have opened
    flags        say through the host's memory that all copies are done, and that they fit
    each rank    reads what it needs from all of them

Sums go in the order of ranks, so that all ranks have the same bits. Processes take turns on a GPU,
so calls go from the thread of the work queue, and backward goes on meanwhile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, divide
from shoal.comm.group import Group
from shoal.comm.objects import all_gather_bytes
from shoal.comm.transport import cuda_ipc
from shoal.errors import Desync

if TYPE_CHECKING:
    from shoal.comm.executors.shared_memory import SharedMemory
    from shoal.comm.work_queue import QueuedWork

CAPACITY = 64 << 20  # bytes of each rank; what is longer goes in pieces
_ALIGN = 256
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_REDUCED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OPS = (Op.SUM, Op.MEAN, Op.MAX, Op.MIN)


def share(executor: SharedMemory, device: torch.device) -> SharedGpu | None:
    """All ranks call it with their device; None on all of them where they do not share a GPU."""
    group = Group(executor)
    name = cuda_ipc.device_name(device).encode()
    if any(theirs != name for theirs in all_gather_bytes(group, name)) or not name:
        return None
    memories: list[Tensor] = []
    try:
        memory, handle = cuda_ipc.allocate(device, CAPACITY)
    except cuda_ipc.CudaIpcError:
        handle = b""
    handles = all_gather_bytes(group, handle.hex().encode(), 2 * cuda_ipc.HANDLE_BYTES)
    try:
        for rank, theirs in enumerate(handles):
            opened = bytes.fromhex(theirs.decode())
            mine = rank == executor.rank and bool(opened)
            memories.append(memory if mine else cuda_ipc.open_handle(device, opened, CAPACITY))
    except cuda_ipc.CudaIpcError:  # ranks of one process cannot open each other's memory
        memories.clear()
    if not all(all_gather_bytes(group, b"opened" if memories else b"")):
        return None
    return SharedGpu(executor, device, memories)


class SharedGpu:
    """`submit` takes the place of the executor's for tensors on the GPU."""

    def __init__(self, executor: SharedMemory, device: torch.device, memories: list[Tensor]):
        self.device = device
        self._rank = executor.rank
        self._size = executor.size
        self._memories = memories
        self._executor = executor
        self._used = 0
        self._latest: QueuedWork | None = None

    def submit(self, call: Call) -> QueuedWork | None:
        """None where the call goes through the host's memory."""
        data = call.data
        out = call.out
        if not isinstance(data, Tensor) or not isinstance(out, Tensor):
            return None
        if not (_is_here(data, self.device) and _is_here(out, self.device)) or not data.numel():
            return None
        if call.kind in ("all_reduce", "reduce_scatter") and (
            data.dtype not in _REDUCED or call.op not in _OPS
        ):
            return None
        if data.nbytes <= CAPACITY:
            return self._submit(call)
        if call.kind not in ("all_reduce", "broadcast"):
            return None
        flat = data.detach().view(-1)
        into = out.detach().view(-1)
        step = CAPACITY // data.itemsize
        pieces = [slice(start, start + step) for start in range(0, data.numel(), step)]
        works = [self._submit(call._replace(data=flat[p], out=into[p])) for p in pieces]
        return works[-1]

    def _submit(self, call: Call) -> QueuedWork:
        data = call.data
        out = call.out
        assert isinstance(data, Tensor) and isinstance(out, Tensor)
        where = self._room(data.nbytes, call.timeout_s)
        stream = torch.cuda.current_stream(self.device)
        if call.kind != "broadcast" or call.root == self._rank:
            self._memories[self._rank][where].view(data.dtype).copy_(data.detach().view(-1))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(stream)

        def run() -> None:
            copied.synchronize()
            self._agree(call, data)
            with torch.cuda.stream(stream):
                given = [memory[where].view(data.dtype) for memory in self._memories]
                _read(call, given, self._rank, out.detach().view(-1))

        self._latest = self._executor.queue.call(run)
        return self._latest

    def _agree(self, call: Call, data: Tensor) -> None:
        """All copies are done, and all ranks have called the same."""
        said = [KINDS.index(call.kind), data.numel(), data.itemsize, call.op.code, call.root]
        mine = torch.tensor(said)
        everything = mine.new_empty(self._size, len(said))
        self._executor.exchange_now(mine, everything, call.timeout_s)
        for peer, theirs in enumerate(everything.tolist()):
            if theirs != said:
                called = (f"{KINDS[kind]} of {count} numbers" for kind, count, *_ in (said, theirs))
                raise Desync(self._rank, next(called), peer, next(called))

    def _room(self, num_bytes: int, timeout_s: float | None) -> slice:
        """Where all ranks put what they give; no rank reads there any more."""
        room = math.ceil(num_bytes / _ALIGN) * _ALIGN
        if self._used + room > CAPACITY:
            assert self._latest is not None
            self._latest.wait()
            torch.cuda.synchronize(self.device)
            self._executor.submit(Call("barrier", timeout_s=timeout_s)).wait()
            self._used = 0
        start = self._used
        self._used += room
        return slice(start, start + num_bytes)


def _is_here(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.is_contiguous()


def _combine(call: Call, given: list[Tensor], into: Tensor) -> None:
    """Numbers of 16 bits are added up in 32."""
    is_half = into.itemsize == 2
    total = given[0].float() if is_half else into.copy_(given[0])
    for each in given[1:]:
        call.op.combine(total, each)
    if call.op is Op.MEAN:
        divide(total, len(given))
    if is_half:
        into.copy_(total)


def _read(call: Call, given: list[Tensor], rank: int, out: Tensor) -> None:
    """What a rank takes from the memories of all of them."""
    if call.kind == "all_reduce":
        _combine(call, given, out)
    elif call.kind == "reduce_scatter":
        mine = slice(rank * out.numel(), (rank + 1) * out.numel())
        _combine(call, [each[mine] for each in given], out)
    elif call.kind == "all_gather":
        torch.cat(given, out=out)
    elif rank != call.root:
        out.copy_(given[call.root])
