"""Memory that workers share with the servers of their host.

    a worker's own    [ gradients, once a part | inbox ]     elements of its flat buffer
    everybody's       [ weights ]                            the same elements

It has no name: a worker makes it and passes it on with a frame. A server accepts it only with
exactly the size it expects and with the seals, so that nobody can cut it off under the server's
hands. Weights that all workers see are there where everybody waits for everybody: then nobody
reads while the servers write.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.server.protocol.frames import Refused
from shoal.transport.shm import memfd

Tell = Callable[[str], list[str]]  # what every rank says, by rank; all ranks call it


class WorkerSegment:
    """`parts` x `size` elements to push, and `size` to pull into."""

    def __init__(self, memory: mmap.mmap, dtype: torch.dtype, size: int, parts: int):
        whole = torch.frombuffer(memory, dtype=dtype)
        self.out = whole[: parts * size].view(parts, size)
        self.inbox = whole[parts * size : (parts + 1) * size]


def make(dtype: torch.dtype, size: int, parts: int) -> tuple[WorkerSegment, int] | None:
    """A segment and its descriptor, which the caller closes; None where there is no such memory."""
    num_bytes = segment_bytes(dtype, size, parts)
    handle = memfd.make("shoal-worker", num_bytes)
    if handle < 0:
        return None
    try:
        return WorkerSegment(memfd.map_all(handle, num_bytes), dtype, size, parts), handle
    except OSError:
        os.close(handle)
        return None


def attach(handle: int, dtype: torch.dtype, size: int, parts: int) -> WorkerSegment:
    """The segment that a worker has passed on; refused unless it is what the server expects."""
    return WorkerSegment(_map(handle, segment_bytes(dtype, size, parts)), dtype, size, parts)


def attach_weights(handle: int, dtype: torch.dtype, size: int) -> Tensor:
    """The memory for everybody's weights, as above."""
    return torch.frombuffer(_map(handle, size * dtype.itemsize), dtype=dtype)


def share(tell: Tell, rank: int, num_bytes: int | None) -> int | None:
    """A descriptor, which the caller closes, of memory that rank 0 makes and all others open.

    None on all of them if one cannot, or does not want to (`num_bytes` is None).
    """

    def exchange(text: bytes) -> list[bytes]:
        return [answer.encode() for answer in tell(text.decode())]

    def attach(offers: list[memfd.Offer]) -> int:
        if num_bytes is None:
            raise ValueError("this rank does not share its weights")
        return offers[0].open_checked(num_bytes)

    fd = memfd.make("shoal-weights", num_bytes) if rank == 0 and num_bytes is not None else -1
    return memfd.rendezvous(exchange, fd, attach, os.close)


def _map(handle: int, num_bytes: int) -> mmap.mmap:
    if not memfd.is_sealed(handle, num_bytes):
        raise Refused(f"shared memory has to be sealed and of {num_bytes} bytes")
    try:
        return memfd.map_all(handle, num_bytes)
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
