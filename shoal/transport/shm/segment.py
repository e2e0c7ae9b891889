"""The memory that the ranks of one host share, and what its outcomes mean.

It has no name in any file system: rank 0 makes it, the others open it through rank 0's process,
so nothing can be left behind. It is open to the same user only.
"""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Callable

from shoal.errors import Desync, PeerLost, ShoalError
from shoal.transport.shm import process_exit as exits
from shoal.transport.shm.flight_recorder import Record, dump

try:
    from shoal.transport.shm import _shm
except ImportError:  # installed without a compiler
    _shm = None  # type: ignore[assignment]

SLOT_BYTES = 256 << 10
FINE, LOST, DESYNC, LATE, INTERRUPTED, WRONG_SIZE, CLOSED = range(7)
# everybody's bytes, in the order of ranks; all ranks call it
Exchange = Callable[[bytes], list[bytes]]


class Segment:
    """One rank's hold on the shared memory of a group."""

    def __init__(self, handle: object, rank: int, size: int, timeout_s: float):
        self.handle = handle
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.timeout_ns = int(timeout_s * 1e9)
        self.closed = False
        self._told: list[str] = []

    def check(self, outcome: int, doing: str = "") -> None:
        """Raise what `outcome` stands for; the first time, show the last operations of all."""
        if outcome == FINE:
            return
        error = self._error(outcome, doing)
        if not self._told and outcome != CLOSED:
            self._told.append(str(error))
            dump(self, str(error))
        raise error

    def within(self, timeout_s: float) -> Segment:
        """The same for a call with a timeout of its own."""
        other = copy.copy(self)
        other.timeout_s = timeout_s
        other.timeout_ns = int(timeout_s * 1e9)
        return other

    def last(self, rank: int) -> Record | None:
        found = self.history(rank)
        return found[-1] if found else None

    def history(self, rank: int) -> list[Record]:
        """The last operations of a rank, oldest first."""
        return [Record(*fields) for fields in _shm.history(self.handle, rank)]

    def lost(self, peer: int, doing: str, after_s: float | None = None) -> PeerLost:
        """The error that tells of `peer`, with the last that it did."""
        last = self.last(peer)
        its = "none yet" if last is None else f"{last}, {'ended' if last.end_ns else 'begun'}"
        end = "no answer before the timeout ended"
        status = None
        if after_s is None:
            end, status = self._end_of(peer)
        said = f"{doing} ({end}; its last operation: {its})"
        return PeerLost(self.rank, peer, said, after_s, status)

    def tune(self, direct_bytes: int, spins: int = -1) -> None:
        """Up to where everybody reads all in a reduction; how long to spin before sleeping."""
        _shm.tune(self.handle, direct_bytes, spins)

    def leave(self) -> None:
        """End this rank's waits; ranks that still wait for it are told that it has gone."""
        _shm.leave(self.handle)

    def close(self) -> None:
        """Give the memory back. Nobody may use it any more."""
        if not self.closed:
            self.closed = True
            _shm.leave(self.handle)
            _shm.detach(self.handle)

    def _error(self, outcome: int, doing: str) -> ShoalError:
        if outcome == CLOSED:
            return ShoalError(f"rank {self.rank} has closed this group")
        _, lost, first, second, seq = _shm.failure(self.handle)
        own = self.last(self.rank)
        doing = doing or ("no operation" if own is None else str(own))
        if outcome == DESYNC:
            calls = {rank: self._call(rank, seq) for rank in (first, second)}
            return Desync(first, calls[first], second, calls[second])
        return self.lost(lost, doing, self.timeout_s if outcome == LATE else None)

    def _end_of(self, peer: int) -> tuple[str, int | None]:
        """A rank may also have closed the group, and its process live on."""
        pidfd = _shm.pidfd(self.handle, peer)
        status = exits.exit_status(pidfd)
        if status is None and pidfd >= 0 and not exits.has_ended(pidfd):
            return "it has left the group", None
        return exits.told(status), status

    def _call(self, rank: int, seq: int) -> str:
        found = [record for record in self.history(rank) if record.seq == seq]
        return str(found[0]) if found else f"another operation #{seq}"


def is_built() -> bool:
    return _shm is not None


def join(
    exchange: Exchange,
    rank: int,
    size: int,
    timeout_s: float = 1800.0,
    slot_bytes: int = SLOT_BYTES,
) -> Segment | None:
    """Share memory with the other ranks; None on all of them if one of them cannot."""
    fd = -1
    generation = secrets.randbits(63)
    try:
        if rank == 0 and is_built():
            fd = _create(size, slot_bytes, generation)
        offer = exchange(f"{os.getpid()} {fd} {generation}".encode())[0]
        handle = _take(offer.decode(), rank, size)
        answers = exchange(b"no" if handle is None else b"yes")
    finally:
        if fd >= 0:
            os.close(fd)
    if handle is None or b"no" in answers:
        return None
    _shm.watch(handle)
    return Segment(handle, rank, size, timeout_s)


def _create(size: int, slot_bytes: int, generation: int) -> int:
    try:
        return _shm.create(size, slot_bytes, _ring_bytes(size), generation)
    except OSError:  # no memory left, or not allowed here
        return -1


def _ring_bytes(size: int) -> int:
    """For each pair of ranks; some megabytes for all of them."""
    return min(256 << 10, max(8 << 10, (4 << 20) // (size * size) >> 10 << 10))


def _take(offer: str, rank: int, size: int) -> object | None:
    pid, fd, generation = (int(word) for word in offer.split())
    if fd < 0 or not is_built():
        return None
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # another host, or another user
        return None
    try:
        return _shm.attach(own, rank, size, generation)  # type: ignore[no-any-return]
    except ValueError:
        return None
    finally:
        os.close(own)
