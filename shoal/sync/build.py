"""From the value to the thing: which sync a strategy asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import BadInput, NotBuilt
from shoal.group.group import Group
from shoal.replica.flat import FlatParams
from shoal.strategy import Ddp, Gossip, Localsgd, Ps, Single, SyncPart
from shoal.sync.allreduce import AllReduce
from shoal.sync.compressed import CompressedReduce
from shoal.sync.exact import ExactReduce
from shoal.sync.local import LocalUpdate
from shoal.sync.localsgd import LocalSgd
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
    statistics: Sequence[Tensor] = ()  # of BatchNorm, where replicas keep their own
    say: Callable[[str], None] = lambda sentence: None


def build_sync(part: SyncPart, replica: Replica) -> Sync:
    """Chosen once, when a step is built; nothing asks again inside a step."""
    flat, update, group = replica.flat, replica.update, replica.group
    _check(part, replica)
    match part:
        case Single() | Ddp() if replica.exact_microbatches is not None:
            return ExactReduce(flat, update, group, replica.exact_microbatches, _bytes(part))
        case Single():
            return LocalUpdate(flat, update)
        case Ddp(compress=None):
            return AllReduce(flat, update, group, _bytes(part))
        case Ddp(compress=str(compress)):
            return CompressedReduce(flat, update, group, _bytes(part), compress)
        case Localsgd(every=every, outer=outer, compress=compress):
            return LocalSgd(flat, update, group, every, outer, compress, replica.statistics)
        case Gossip() if group.size == 1:
            return LocalUpdate(flat, update)
        case Gossip():
            from shoal.sync.gossip import build_gossip  # networkx: only where it is needed

            return build_gossip(part, flat, update, group, replica.statistics, replica.say)
        case Ps():
            return join_servers(part, flat, update, group, replica.exact_microbatches)
    raise NotBuilt(f"{part} is not built yet: this version has no runtime for it")


def _check(part: SyncPart, replica: Replica) -> None:
    compress = getattr(part, "compress", None)
    if replica.exact_microbatches is not None and (compress or isinstance(part, Localsgd | Gossip)):
        raise BadInput(
            f"exact=True adds up every gradient in full, which {part} does not do: take ddp"
        )
    if compress and isinstance(part, Ddp) and replica.update.scaler is not None:
        raise BadInput(
            f'{part} and precision="fp16" exclude each other: the scale of such gradients changes '
            'between steps, and so would what is left to send; take precision="bf16"'
        )


def _bytes(part: SyncPart) -> int:
    return int(part.bucket_mb * (1 << 20)) if isinstance(part, Ddp) else DEFAULT_BUCKET_BYTES
