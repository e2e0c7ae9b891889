"""A transport through shared memory: messages go through a ring for each pair of ranks.

A short message is in the ring when `send` returns. What does not fit is moved by the thread that
waits, or by a service thread while none waits, so a rank that computes does not delay its peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from shoal.comm.transport.shm import segment as shared
from shoal.comm.transport.shm.segment import FINE, INTERRUPTED, LATE, LOST, WRONG_SIZE, Segment
from shoal.errors import ShoalError
from shoal.runtime.waits import waiting

if shared.is_built():
    from shoal.comm.transport.shm import _shm

_TAGS = (1 << 64) - 1
_MAX_UNSWEPT = 256
ANY_SOURCE = -1


class ShmWork:
    """A message in flight. It holds its tensor until it is done."""

    def __init__(
        self, transport: ShmTransport, op: int, data: Tensor, is_send: bool, peer: int, doing: str
    ):
        self._transport = transport
        self._peer = peer
        self.op = op
        self._data = data
        self._doing = doing
        self.after: Callable[[], None] | None = None
        self.source = -1
        self.is_done = False
        self._error: ShoalError | None = None  # of a message that has failed
        self.is_send = is_send

    def _whom(self) -> str:
        return self._transport.segment.whom(self._peer)

    def poll(self) -> bool:
        if not self.is_done and _shm.state(self._transport.segment.handle, self.op) >= 0:
            self.wait()
        return self.is_done

    def is_lost(self) -> bool:
        """Whether its peer has gone without it; looks for some milliseconds."""
        return not self.poll() and _shm.wait(self._transport.segment.handle, self.op, 0)[0] == LOST

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.is_done:
            try:
                self._end(timeout_s)
            except ShoalError as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def _end(self, timeout_s: float | None) -> None:
        segment = self._transport.segment
        timeout_ns = segment.timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        with waiting(f"rank {segment.rank}", self._whom, self._doing):
            outcome, peer, num_bytes = _shm.wait(segment.handle, self.op, timeout_ns)
        self.is_done = True
        self._transport.release(self, self.op)
        self.source = peer
        if outcome == WRONG_SIZE:
            raise ShoalError(
                f"rank {segment.rank} expected {self._data.nbytes} bytes from rank {peer} "
                f"in {self._doing}, got {num_bytes}"
            )
        if outcome in (LOST, LATE, INTERRUPTED):
            raise segment.lost(peer, self._doing, timeout_ns / 1e9 if outcome == LATE else None)
        if outcome != FINE:
            segment.check(outcome, self._doing)
        if self.after is not None:
            self.after()


class ShmTransport:
    """Messages between the ranks of a segment; tags are taken modulo 2 to the 64."""

    def __init__(self, segment: Segment):
        self.segment = segment
        self.rank = segment.rank
        self.size = segment.size
        self._in_flight: dict[int, ShmWork] = {}
        self._thread: threading.Thread | None = None

    def send(self, data: Tensor, dst: int, tag: int) -> ShmWork:
        return self._post(1, data, dst, tag, f"send to {dst}, tag {tag}")

    def recv(
        self, into: Tensor, src: int, tag: int, after: Callable[[], None] | None = None
    ) -> ShmWork:
        """`src` may be ANY_SOURCE; `source` of the work is then the rank that sent the message.

        `after` is called by the wait once the message has arrived.
        """
        work = self._post(0, into, src, tag, f"recv from {src}, tag {tag}")
        work.after = after
        return work

    def close(self) -> None:
        """Stop the service thread. Messages that are still in flight are dropped."""
        if self._thread is not None:
            _shm.stop(self.segment.handle)
            self._thread.join()
            self._thread = None
        for op in list(self._in_flight):
            _shm.forget(self.segment.handle, op)
        self._in_flight.clear()

    def withdraw(self, work: ShmWork) -> bool:
        """Cancel a receive for which nothing has arrived. No thread may wait for it meanwhile."""
        if work.is_done or not _shm.withdraw(self.segment.handle, work.op):
            return False
        del self._in_flight[work.op]
        return True

    def release(self, work: ShmWork, op: int) -> None:
        if self._in_flight.pop(op, None) is not None:
            _shm.forget(self.segment.handle, op)

    def _post(self, is_send: int, data: Tensor, peer: int, tag: int, doing: str) -> ShmWork:
        handle = self.segment.handle
        if len(self._in_flight) >= _MAX_UNSWEPT:
            self._sweep()
        op = _shm.post(handle, is_send, data, data.nbytes, peer, tag & _TAGS)
        work = ShmWork(self, op, data, is_send == 1, peer, doing)
        self._in_flight[op] = work
        if _shm.state(handle, op) >= 0 and is_send:
            work.wait()
        elif self._thread is None:
            self._thread = threading.Thread(
                target=_shm.serve, args=(handle,), daemon=True, name="shoal messages"
            )
            self._thread.start()
        return work

    def _sweep(self) -> None:
        """Release sends that are done and were not waited for."""
        for op, work in list(self._in_flight.items()):
            if work.is_send and _shm.state(self.segment.handle, op) == FINE:
                work.wait()
