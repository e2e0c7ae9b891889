"""From the value to the thing: which sync a strategy asks for."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import NotBuilt
from shoal.group.group import Group
from shoal.replica.flat import FlatParams
from shoal.strategy import Ddp, Ps, Single, SyncPart
from shoal.sync.allreduce import AllReduce
from shoal.sync.exact import ExactReduce
from shoal.sync.local import LocalUpdate
from shoal.sync.ps import join_servers
from shoal.sync.sync import Sync
from shoal.sync.update import Update

DEFAULT_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Replica:
    """What a sync works on: one replica's parameters, optimizer, and its peers."""

    flat: FlatParams
    update: Update
    group: Group
    exact_microbatches: int | None = None  # the same bits at any number of replicas


def build_sync(part: SyncPart, replica: Replica) -> Sync:
    """Chosen once, when a step is built; nothing asks again inside a step."""
    flat, update, group = replica.flat, replica.update, replica.group
    match part:
        case Single() | Ddp() if replica.exact_microbatches is not None:
            return ExactReduce(flat, update, group, replica.exact_microbatches, _bytes(part))
        case Single():
            return LocalUpdate(flat, update)
        case Ddp():
            return AllReduce(flat, update, group, _bytes(part))
        case Ps():
            return join_servers(part, flat, update, group, replica.exact_microbatches)
    raise NotBuilt(f"{part} is not built yet: this version has no runtime for it")


def _bytes(part: SyncPart) -> int:
    return int(part.bucket_mb * (1 << 20)) if isinstance(part, Ddp) else DEFAULT_BUCKET_BYTES
