"""The memory in which workers of this host have their gradients, between replicas.

    worker ── memfd ──> every replica                     at the start, and to a new member
    replica ── Mapped ──> every other replica             which memory it has mapped
    head ── Append without gradients ──> … ──> tail       to those that have the same memory
    head <── LentReturned <── … <── tail                      all of these have applied it

A push that is lent to the chain stays in the memory of its worker, and no replica copies it. So it
is acknowledged only when each member has applied it: then the worker may overwrite it.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Annotated

import msgspec

from shoal.runtime.cores import cores
from shoal.server.chain.config import Number
from shoal.server.consistency import Count

_MAX_MEMORIES = 1 << 16
_AT_ONCE_BYTES = 4 << 20
_AT_ONCE_ON_OWN_CORES_BYTES = 256 << 10


@cache
def at_once_bytes(servers: int) -> int:
    """From which size on the replicas apply a lent push at the same time.

    It takes one message more from each, which pays for small pushes only where the servers of
    this host do not share cores.
    """
    return _AT_ONCE_ON_OWN_CORES_BYTES if cores() >= 2 * servers else _AT_ONCE_BYTES


class PushMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One memory of one process of a worker; the file tells it from any other of this host."""

    model: Count
    worker: Count
    incarnation: Count
    device: Count
    inode: Count


class Mapped(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To every other replica: all the memory that the sender has mapped now."""

    memories: Annotated[tuple[PushMemory, ...], msgspec.Meta(max_length=_MAX_MEMORIES)] = ()


class LentReturned(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the predecessor: the sender, and all behind it, have applied all up to `position`."""

    position: Number


class Release:
    """Up to which position no member reads the memory of workers any more.

    A replica says so for itself and all behind it. What was said once stays true: a member that is
    added later has got what was applied before by value.
    """

    def __init__(self) -> None:
        self.latest_lent = 0  # the last lent push that is applied here
        self._by_peer: dict[int, int] = {}
        self._lent: deque[int] = deque()  # that are not released yet
        self._must_tell = False

    def note_lent(self, position: int) -> None:
        """A push that was lent has been applied here."""
        self.latest_lent = position
        self._lent.append(position)

    def heard(self, peer: int, position: int) -> None:
        self._by_peer[peer] = max(position, self._by_peer.get(peer, 0))

    def forget(self, peer: int) -> None:
        """It has begun again, without state."""
        self._by_peer.pop(peer, None)

    def tell_again(self) -> None:
        """The predecessor is another one, or may have missed something."""
        self._must_tell = True

    @property
    def is_pending(self) -> bool:
        """Whether anything waits for a release, or is to be sent to the predecessor."""
        return self._must_tell or bool(self._lent)

    def upto(self, applied: int, successor: int | None) -> int:
        return applied if successor is None else min(applied, self._by_peer.get(successor, 0))

    def take(self, upto: int) -> list[int]:
        """The lent pushes that are released now."""
        taken = []
        while self._lent and self._lent[0] <= upto:
            taken.append(self._lent.popleft())
        self._must_tell = self._must_tell or bool(taken)
        return taken

    def is_news(self, upto: int) -> bool:
        """Whether the predecessor is to hear it."""
        must_tell = self._must_tell
        self._must_tell = False
        return must_tell and upto > 0
