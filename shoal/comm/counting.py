"""A group that counts the bytes which leave this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from shoal.comm.executors.scheduled.executor import ScheduledGroup
from shoal.comm.group import Group, Op
from shoal.transport.transport import Work


class CountingGroup:
    """Passes calls on and adds up what they make this rank send, in `sent` bytes.

    A call counts as the schedule that sends the least: an all-reduce of V bytes 2V(p-1)/p, as a
    ring does; an all-gather the piece for each of the others. How the group carries it out (a
    tree of more bytes and fewer rounds, shared memory) does not change the count, unless somebody
    has named the algorithm of an all-reduce: then it is what that one sends.
    """

    def __init__(self, group: Group):
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self.sent = 0

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        self.sent += data.nbytes
        return self._group.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        return self._group.recv(into, src, tag)

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        self.sent += data.nbytes if self._passes_on(root) else 0
        return self._group.broadcast(data, root)

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        self.sent += data.nbytes if self.rank != root else 0
        return self._group.reduce(data, root, op)

    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work:
        named = None
        if isinstance(self._group, ScheduledGroup):
            named = self._group.sends("all_reduce", data.nbytes)
        self.sent += all_reduce_bytes(data.nbytes, self.size) if named is None else named
        return self._group.all_reduce(data, op)

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        self.sent += data.nbytes if self.rank != root else 0
        return self._group.gather(out, data, root)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        self.sent += out.nbytes * (self.size - 1) if self.rank == root else 0
        return self._group.scatter(out, data, root)

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        self.sent += data.nbytes * (self.size - 1)
        return self._group.all_gather(out, data)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        self.sent += out.nbytes * (self.size - 1)
        return self._group.reduce_scatter(out, data, op)

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        self.sent += data.nbytes // self.size * (self.size - 1)
        return self._group.all_to_all(out, data)

    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work:
        self.sent += data.nbytes if self._passes_on(0) else 0
        return self._group.scan(data, op)

    def barrier(self) -> Work:
        return self._group.barrier()

    def duplicate(self) -> CountingGroup:
        return CountingGroup(self._group.duplicate())

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        found = self._group.subgroup(ranks)
        return None if found is None else CountingGroup(found)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in the block is no part of training."""
        before = self.sent
        yield
        self.sent = before

    def _passes_on(self, root: int) -> bool:
        """In a chain from the root everybody but the last sends once."""
        return (self.rank - root) % self.size < self.size - 1


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """What a rank of `size` sends in an all-reduce of `num_bytes`."""
    return round(2 * num_bytes * (size - 1) / size)
