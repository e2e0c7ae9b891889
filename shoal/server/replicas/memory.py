"""The memory in which workers of this host have their gradients, between replicas.

    worker ── memfd ──> every replica                     at the start, and to a new member
    replica ── Mapped ──> every other replica             which memory it has mapped
    head ── Append without gradients ──> … ──> tail       to those that have the same memory
    head <── Acked <── … <── tail                         all of these have applied it

A push that is lent to the chain stays in the memory of its worker, and no replica copies it. So it
is acknowledged only when each member has applied it: then the worker may overwrite it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.server.consistency import Count

_MAX_MEMORIES = 1 << 16


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
