"""Memory that workers share with the servers of their host.

    per worker     [ gradients, once per partial sum | inbox ]   elements of its flat buffer
    all workers    [ weights ]                                   the same elements

It is a memfd: a worker makes it and passes its descriptor with a frame. A server accepts it only
with the expected size and sealed, so that no process can truncate it while the server uses it.
Workers map the weights only where the rule is synchronous: then no worker reads them while the
servers write.

On a GPU that one worker has in common with one server, pushes and pulls go without the host:

    worker   SHARE_DEVICE, with the name of its GPU ──> server
             <── handle of memory on that GPU           [ gradients, once per partial sum | inbox ]
             opens it; when all servers have answered:
             SHARE_DEVICE, accepted ──> server          reads pushes there, writes what is pulled

The server owns that memory: a worker that is killed takes nothing away. A worker in the process of
the server cannot open a handle of its own process: it takes the tensor from `HERE`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.transport import cuda_ipc
from shoal.comm.transport.shm import memfd
from shoal.server.messages import DeviceAsked, DeviceOffered, ModelSpec
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.protocol import Refused

Tell = Callable[[str], list[str]]  # an all-gather of short texts, by rank


class WorkerSegment:
    """`sums` x `size` elements to push, and `size` to pull into; of a host or a GPU."""

    def __init__(self, memory: Tensor, dtype: torch.dtype, size: int, sums: int):
        elements = memory.view(dtype)
        self.out = elements[: sums * size].view(sums, size)
        self.inbox = elements[sums * size : (sums + 1) * size]


def make(dtype: torch.dtype, size: int, sums: int) -> tuple[WorkerSegment, int] | None:
    """A segment and its descriptor, which the caller closes; None where memfd is unavailable."""
    num_bytes = segment_bytes(dtype, size, sums)
    descriptor = memfd.make("shoal-worker", num_bytes)
    if descriptor < 0:
        return None
    try:
        memory = torch.frombuffer(memfd.map_all(descriptor, num_bytes), dtype=torch.uint8)
        return WorkerSegment(memory, dtype, size, sums), descriptor
    except OSError:
        os.close(descriptor)
        return None


def attach(descriptor: int, dtype: torch.dtype, size: int, sums: int) -> WorkerSegment:
    """The segment of a worker; Refused if it is not sealed or has another size."""
    memory = map_sealed(descriptor, segment_bytes(dtype, size, sums))
    return WorkerSegment(torch.frombuffer(memory, dtype=torch.uint8), dtype, size, sums)


def file_of(descriptor: int) -> tuple[int, int]:
    """What tells this memory from any other of the host."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def attach_weights(descriptor: int, dtype: torch.dtype, size: int) -> Tensor:
    """The memory for the weights of all workers; Refused as above."""
    return torch.frombuffer(map_sealed(descriptor, size * dtype.itemsize), dtype=dtype)


def share(tell: Tell, rank: int, num_bytes: int | None) -> int | None:
    """See `memfd.share`."""

    def exchange(text: bytes) -> list[bytes]:
        return [answer.encode() for answer in tell(text.decode())]

    return memfd.share(exchange, rank, num_bytes)


def map_sealed(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Memory of a worker; Refused if it is not sealed or has another size."""
    if not memfd.is_sealed(descriptor, num_bytes):
        raise Refused(f"expected sealed shared memory of {num_bytes} bytes")
    try:
        return memfd.map_all(descriptor, num_bytes)
    except OSError as error:
        raise Refused(f"shared memory cannot be mapped: {error}") from error


def segment_bytes(dtype: torch.dtype, size: int, sums: int) -> int:
    return (sums + 1) * size * dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be sent or filled."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


_ANCESTRY = secrets.token_hex(8)  # that of forks, too
HERE: dict[int, WorkerSegment] = {}  # offered to workers of this process
_numbers = itertools.count(1)


def this_process() -> str:
    return f"{_ANCESTRY}:{os.getpid()}"


def _layout(spec: ModelSpec) -> tuple[torch.dtype, int, int]:
    """Of what one worker pushes to one server, and what it pulls from it."""
    return DTYPES[spec.dtype], spec.stop - spec.start, partial_sums(spec)


def offer(
    asked: DeviceAsked, spec: ModelSpec, device: torch.device
) -> tuple[WorkerSegment, DeviceOffered] | None:
    """Memory for this worker; None where it and the server have no GPU in common."""
    if not asked.device or asked.device != cuda_ipc.device_name(device):
        return None
    try:
        memory, handle = cuda_ipc.allocate(device, segment_bytes(*_layout(spec)))
    except cuda_ipc.CudaIpcError:
        return None
    segment = WorkerSegment(memory, *_layout(spec))
    if asked.process == this_process():
        number = next(_numbers)
        HERE[number] = segment
        return segment, DeviceOffered(number=number)
    return segment, DeviceOffered(handle=handle)


def open_offer(
    offered: DeviceOffered, spec: ModelSpec, device: torch.device
) -> WorkerSegment | None:
    """The memory of an offer; None where there is none, or this process cannot open it."""
    if offered.number:
        return HERE.pop(offered.number)
    if not offered.handle:
        return None
    try:
        memory = cuda_ipc.open_handle(device, offered.handle, segment_bytes(*_layout(spec)))
    except cuda_ipc.CudaIpcError:
        return None
    return WorkerSegment(memory, *_layout(spec))
