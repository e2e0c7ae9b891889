"""The shared-memory segment of the ranks of one host, and its outcomes as errors."""

from __future__ import annotations

import copy
import os
import signal
from contextlib import suppress
from dataclasses import dataclass

from shoal.comm.transport.shm import memfd
from shoal.comm.transport.shm.flight_recorder import RecordedCall, dump
from shoal.comm.transport.shm.memfd import Exchange, Offer, pidfd_send_signal
from shoal.comm.transport.shm.process_exit import describe_status, exit_status, has_ended
from shoal.errors import Desync, PeerLost, ShoalError
from shoal.runtime.run_dir import RunDir
from shoal.runtime.waits import LongWait, add_source, process_in_words, state_of

NOT_BUILT = "Shoal was installed without a compiler"
try:
    from shoal.comm.transport.shm import _shm

    if not hasattr(_shm, "waiting"):  # the newest of its functions
        _shm = None  # type: ignore[assignment]
        NOT_BUILT = "the native part of Shoal is older than its sources: install Shoal again"
except ImportError:
    _shm = None  # type: ignore[assignment]

SLOT_BYTES = 256 << 10
_SLOTS = 4  # of each rank
FINE, LOST, DESYNC, LATE, INTERRUPTED, WRONG_SIZE, CLOSED = range(7)


@dataclass(eq=False)
class Segment:
    """One rank's view of the shared memory of a group."""

    handle: object
    rank: int
    size: int
    timeout_s: float
    run_dir: RunDir | None = None
    explains: bool = True  # a lost rank is an error whose cause is looked for and written down

    def __post_init__(self) -> None:
        self.timeout_ns = int(self.timeout_s * 1e9)
        self.closed = False
        self._dumped: list[str] = []  # shared by copies, so that one failure is dumped once

    def check(self, outcome: int, doing: str = "") -> None:
        """Raise the error of `outcome`; the first time, dump the last operations of all ranks."""
        if outcome == FINE:
            return
        error = self._error(outcome, doing)
        is_expected = outcome == LOST and not self.explains
        if not self._dumped and outcome != CLOSED and not is_expected:
            self._dumped.append(str(error))
            dump(self, str(error), self.run_dir)
        raise error

    def within(self, timeout_s: float) -> Segment:
        """The same segment with another timeout, for one call."""
        other = copy.copy(self)
        other.timeout_s = timeout_s
        other.timeout_ns = int(timeout_s * 1e9)
        return other

    def last(self, rank: int) -> RecordedCall | None:
        calls = self.history(rank)
        return calls[-1] if calls else None

    def history(self, rank: int) -> list[RecordedCall]:
        """The last operations of a rank, oldest first."""
        return [RecordedCall(*fields) for fields in _shm.history(self.handle, rank)]

    def lost(self, peer: int, doing: str, after_s: float | None = None) -> PeerLost:
        """The error for the loss of `peer`, with its last operation."""
        if after_s is None and not self.explains:
            return PeerLost(self.rank, peer, doing)
        last = self.last(peer)
        operation = "none yet" if last is None else f"{last}, {'ended' if last.end_ns else 'begun'}"
        end = "no answer before the timeout ended"
        status = None
        if after_s is None:
            end, status = self._end_of(peer)
        context = f"{doing} ({end}; its last operation: {operation})"
        return PeerLost(self.rank, peer, context, after_s, status)

    def current_wait(self) -> LongWait | None:
        """For whom a collective of this rank sleeps: those who have not come to it."""
        found = None if self.closed else _shm.waiting(self.handle)
        last = self.last(self.rank) if found else None
        if found is None or last is None or not found[1]:
            return None
        since_ns, missing = found
        whom = " and ".join(map(self._in_words, missing))
        return LongWait(f"rank {self.rank}", whom, str(last), since_ns)

    def _in_words(self, rank: int) -> str:
        return f"rank {rank} ({self.process(rank)})"

    def process(self, rank: int) -> str:
        return process_in_words(_shm.pid(self.handle, rank))

    def is_stopped(self, rank: int) -> bool:
        return state_of(_shm.pid(self.handle, rank)) in ("T", "t")

    def kill(self, rank: int) -> None:
        with suppress(OSError):
            pidfd_send_signal(_shm.pidfd(self.handle, rank), signal.SIGKILL)

    def whom(self, peer: int) -> str:
        """A rank that a message is to come from or to go to."""
        return "any rank" if peer < 0 else self._in_words(peer)

    def leave(self) -> None:
        """End this rank's waits; ranks that wait for it get a `PeerLost`."""
        _shm.leave(self.handle)

    def close(self) -> None:
        """Unmap the memory. It must not be used afterwards."""
        if not self.closed:
            self.closed = True
            _release(self.handle)

    def _error(self, outcome: int, doing: str) -> ShoalError:
        if outcome == CLOSED:
            return ShoalError(f"rank {self.rank} has closed this group")
        _, lost, first, second, seq = _shm.failure(self.handle)
        last = self.last(self.rank)
        doing = doing or ("no operation" if last is None else str(last))
        if outcome == DESYNC:
            calls = {rank: self._call(rank, seq) for rank in (first, second)}
            return Desync(first, calls[first], second, calls[second])
        return self.lost(lost, doing, self.timeout_s if outcome == LATE else None)

    def _end_of(self, peer: int) -> tuple[str, int | None]:
        """How a rank has ended, in words and as exit status; it may also have closed the group."""
        pidfd = _shm.pidfd(self.handle, peer)
        status = exit_status(pidfd)
        if status is None and pidfd >= 0 and not has_ended(pidfd):
            return "it has left the group", None
        return describe_status(status), status

    def _call(self, rank: int, seq: int) -> str:
        calls = [call for call in self.history(rank) if call.seq == seq]
        return str(calls[0]) if calls else f"another operation #{seq}"


def is_built() -> bool:
    return _shm is not None


def join(
    exchange: Exchange,
    rank: int,
    size: int,
    timeout_s: float = 1800.0,
    slot_bytes: int = SLOT_BYTES,
    run_dir: RunDir | None = None,
    explains: bool = True,
) -> Segment | None:
    """Share memory with the other ranks; None on all of them if one of them cannot.

    Rank 0 makes the memory and the others open it.
    """
    generation = memfd.new_generation()
    fd = _create(size, slot_bytes, generation) if rank == 0 else -1

    def attach(offers: list[Offer]) -> object:
        return _attach(offers[0], rank, size)

    handle = memfd.rendezvous(exchange, fd, attach, _release, generation)
    if handle is None:
        return None
    _shm.watch(handle)
    segment = Segment(handle, rank, size, timeout_s, run_dir, explains)
    add_source(segment.current_wait)
    return segment


def _create(size: int, slot_bytes: int, generation: int) -> int:
    """A descriptor, or -1 where memory is full, not allowed, or the native part is missing."""
    slots = _SLOTS * size * slot_bytes
    if not is_built() or not memfd.fits("messages of ranks", slots + size**2 * _ring_bytes(size)):
        return -1
    try:
        return _shm.create(size, slot_bytes, _ring_bytes(size), generation)
    except OSError:
        return -1


def _ring_bytes(size: int) -> int:
    """For each pair of ranks; some megabytes for all of them."""
    return min(256 << 10, max(8 << 10, (4 << 20) // (size * size) >> 10 << 10))


def _attach(offer: Offer, rank: int, size: int) -> object:
    """The native part checks size and generation, since it alone knows the layout."""
    if not is_built():
        raise ValueError(NOT_BUILT)
    fd = offer.open()
    try:
        return _shm.attach(fd, rank, size, offer.generation)
    finally:
        os.close(fd)


def _release(handle: object) -> None:
    _shm.leave(handle)
    _shm.detach(handle)
