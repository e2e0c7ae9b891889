"""Bytes that leave this rank, counted call by call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shoal.comm.call import Call, num_bytes


class SentBytes:
    """What the calls of `group.counted(sent)` make this rank send, in `total` bytes.

    A call counts as the schedule that sends the least: an all-reduce of V bytes 2V(p-1)/p, as a
    ring does; an all-gather the piece for each of the other ranks. How the executor carries it
    out (a tree of more bytes and fewer rounds, shared memory) does not change the count, unless
    the algorithm of an all-reduce has been named: then it is what that one sends.
    """

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in the block is not counted."""
        before = self.total
        yield
        self.total = before


def sent_bytes(call: Call, rank: int, size: int) -> int:
    """What `rank` of `size` sends for a call, by the schedule that sends the least."""
    given = num_bytes(call.data)
    match call.kind:
        case "all_reduce":
            return all_reduce_bytes(given, size)
        case "broadcast" | "scan" | "exclusive_scan":
            # in a chain from the root every rank but the last sends once
            return given if (rank - call.root) % size < size - 1 else 0
        case "reduce" | "gather":
            return given if rank != call.root else 0
        case "scatter":
            return num_bytes(call.out) * (size - 1) if rank == call.root else 0
        case "all_gather":
            return given * (size - 1)
        case "reduce_scatter":
            return num_bytes(call.out) * (size - 1)
        case "all_to_all":
            return given // size * (size - 1)
        case "all_to_all_uneven":
            assert isinstance(call.data, Tensor)
            return given - call.send_counts[rank] * call.data.element_size()
    return 0


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """What a rank of `size` sends in an all-reduce of `num_bytes`."""
    return round(2 * num_bytes * (size - 1) / size)
