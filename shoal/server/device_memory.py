"""Memory on a GPU that one worker shares with one server: pushes and pulls without the host.

    worker   SHARE_DEVICE, with the name of its GPU ──> server
             <── handle of memory on that GPU           [ gradients, once per partial sum | inbox ]
             opens it; when all servers have answered:
             SHARE_DEVICE, accepted ──> server          reads pushes there, writes what is pulled

The server owns the memory: a worker that is killed takes nothing away. A worker in the process of
the server cannot open a handle of its own process: it takes the tensor from `HERE`.
"""

from __future__ import annotations

import itertools
import os
import secrets

import torch
from torch import Tensor

from shoal.server.messages import DeviceAsked, DeviceOffered, ModelSpec
from shoal.server.model.shard import DTYPES, partial_sums
from shoal.server.shared_memory import WorkerSegment, segment_bytes
from shoal.transport import cuda_ipc

_ANCESTRY = secrets.token_hex(8)  # that of forks, too
HERE: dict[int, WorkerSegment] = {}  # offered to workers of this process
_numbers = itertools.count(1)


def this_process() -> str:
    return f"{_ANCESTRY}:{os.getpid()}"


def _segment(memory: Tensor, spec: ModelSpec) -> WorkerSegment:
    """What one worker pushes to one server, and what it pulls from it."""
    elements = memory.view(DTYPES[spec.dtype])
    return WorkerSegment(elements, spec.stop - spec.start, partial_sums(spec))


def _segment_bytes(spec: ModelSpec) -> int:
    return segment_bytes(DTYPES[spec.dtype], spec.stop - spec.start, partial_sums(spec))


def offer(
    asked: DeviceAsked, spec: ModelSpec, device: torch.device
) -> tuple[WorkerSegment, DeviceOffered] | None:
    """Memory for this worker; None where it and the server have no GPU in common."""
    if not asked.device or asked.device != cuda_ipc.device_name(device):
        return None
    try:
        memory, handle = cuda_ipc.allocate(device, _segment_bytes(spec))
    except cuda_ipc.CudaIpcError:
        return None
    segment = _segment(memory, spec)
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
        memory = cuda_ipc.open_handle(device, offered.handle, _segment_bytes(spec))
    except cuda_ipc.CudaIpcError:
        return None
    return _segment(memory, spec)
