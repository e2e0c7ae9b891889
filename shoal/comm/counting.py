"""An executor that counts the bytes which leave this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from shoal.comm.call import Call, Op, num_bytes
from shoal.comm.executor import AllReduce, Broadcast, Executor
from shoal.comm.group import Group
from shoal.transport.transport import Work


class Counting(Executor):
    """Passes calls on and adds up what they make this rank send, in `sent` bytes.

    A call counts as the schedule that sends the least: an all-reduce of V bytes 2V(p-1)/p, as a
    ring does; an all-gather the piece for each of the other ranks. How the executor carries it
    out (a tree of more bytes and fewer rounds, shared memory) does not change the count, unless
    the algorithm of an all-reduce has been named: then it is what that one sends.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self.rank = executor.rank
        self.size = executor.size
        self.any_source = executor.any_source
        self.takes_cores = executor.takes_cores
        self.sent = 0

    def submit(self, call: Call) -> Work:
        self.sent += self._bytes(call)
        return self._executor.submit(call)

    def bind_all_reduce(self, general: AllReduce) -> AllReduce:
        all_reduce = Group(self._executor).all_reduce

        def count_and_call(data: Tensor, op: Op = Op.SUM, out: Tensor | None = None) -> Work:
            self.sent += self._all_reduce_bytes(Call("all_reduce", data))
            return all_reduce(data, op, out)

        return count_and_call

    def bind_broadcast(self, general: Broadcast) -> Broadcast:
        return general

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        self.sent += data.nbytes
        return self._executor.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self._executor.recv(into, src, tag)

    def split(self, ranks: Sequence[int]) -> Counting | None:
        """Counts by itself."""
        child = self._executor.split(ranks)
        return None if child is None else Counting(child)

    def close(self) -> None:
        self._executor.close()

    def describe(self, call: Call) -> str:
        return self._executor.describe(call)

    def bytes_sent(self, call: Call) -> int | None:
        return self._executor.bytes_sent(call)

    def record_times(self) -> None:
        self._executor.record_times()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in the block is not counted."""
        before = self.sent
        yield
        self.sent = before

    def _bytes(self, call: Call) -> int:
        count = _COUNTS.get(call.kind)
        return 0 if count is None else count(self, call)

    def _all_reduce_bytes(self, call: Call) -> int:
        named = self._executor.bytes_sent(call)
        return all_reduce_bytes(num_bytes(call.data), self.size) if named is None else named

    def _chain_bytes(self, call: Call) -> int:
        """In a chain from the root every rank but the last sends once."""
        passes_on = (self.rank - call.root) % self.size < self.size - 1
        return num_bytes(call.data) if passes_on else 0

    def _to_root_bytes(self, call: Call) -> int:
        return num_bytes(call.data) if self.rank != call.root else 0

    def _scatter_bytes(self, call: Call) -> int:
        return num_bytes(call.out) * (self.size - 1) if self.rank == call.root else 0

    def _all_gather_bytes(self, call: Call) -> int:
        return num_bytes(call.data) * (self.size - 1)

    def _reduce_scatter_bytes(self, call: Call) -> int:
        return num_bytes(call.out) * (self.size - 1)

    def _all_to_all_bytes(self, call: Call) -> int:
        return num_bytes(call.data) // self.size * (self.size - 1)

    def _uneven_bytes(self, call: Call) -> int:
        assert isinstance(call.data, Tensor)
        kept = call.send_counts[self.rank] * call.data.element_size()
        return call.data.nbytes - kept


_COUNTS: dict[str, Callable[[Counting, Call], int]] = {
    "broadcast": Counting._chain_bytes,
    "reduce": Counting._to_root_bytes,
    "all_reduce": Counting._all_reduce_bytes,
    "gather": Counting._to_root_bytes,
    "scatter": Counting._scatter_bytes,
    "all_gather": Counting._all_gather_bytes,
    "reduce_scatter": Counting._reduce_scatter_bytes,
    "all_to_all": Counting._all_to_all_bytes,
    "all_to_all_uneven": Counting._uneven_bytes,
    "scan": Counting._chain_bytes,
    "exclusive_scan": Counting._chain_bytes,
}


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """What a rank of `size` sends in an all-reduce of `num_bytes`."""
    return round(2 * num_bytes * (size - 1) / size)
