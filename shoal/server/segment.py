"""Memory that one worker shares with the servers of its host: its gradients, and an inbox.

    [ gradients, once a part | inbox ]          elements of the worker's flat buffer

It has no name: the worker makes it, seals its size and passes it on with its first frame. A
server accepts it only with exactly the size it expects and with the seals, so that nobody can
cut it off under the server's hands.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from shoal.server.frames import Refused

_SEALS = 0
if hasattr(fcntl, "F_SEAL_GROW"):
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """`parts` x `size` elements to push, and `size` to pull into."""

    def __init__(self, memory: mmap.mmap, dtype: torch.dtype, size: int, parts: int):
        whole = torch.frombuffer(memory, dtype=dtype)
        self.out = whole[: parts * size].view(parts, size)
        self.inbox = whole[parts * size : (parts + 1) * size]


def make(dtype: torch.dtype, size: int, parts: int) -> tuple[Segment, int] | None:
    """A segment and its descriptor, which the caller closes; None where there is no such memory."""
    if not hasattr(os, "memfd_create") or not _SEALS:
        return None
    num_bytes = segment_bytes(dtype, size, parts)
    try:
        handle = os.memfd_create("shoal-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(handle, num_bytes)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(handle, num_bytes)
    except OSError:
        os.close(handle)
        return None
    return Segment(memory, dtype, size, parts), handle


def attach(handle: int, dtype: torch.dtype, size: int, parts: int) -> Segment:
    """The segment that a worker has passed on; refused unless it is what the server expects."""
    num_bytes = segment_bytes(dtype, size, parts)
    try:
        sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Refused("a file was passed that is no shared memory") from error
    if sealed & _SEALS != _SEALS or os.fstat(handle).st_size != num_bytes:
        raise Refused(f"shared memory has to be sealed and of {num_bytes} bytes")
    try:
        return Segment(mmap.mmap(handle, num_bytes), dtype, size, parts)
    except OSError as error:
        raise Refused(f"shared memory that cannot be mapped: {error}") from error


def segment_bytes(dtype: torch.dtype, size: int, parts: int) -> int:
    return (parts + 1) * size * dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as bytes that can be sent or filled."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
