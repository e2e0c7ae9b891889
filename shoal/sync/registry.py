"""From the value to the thing: which sync a strategy asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.comm.fellows import Fellows
from shoal.comm.group import Group
from shoal.errors import BadInput, NotBuilt
from shoal.replica.deferred_init import Blank
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.strategy.strategy import (
    Ddp,
    Gossip,
    Hogwild,
    Localsgd,
    Mapreduce,
    Ps,
    Single,
    SyncPart,
    Zero,
)
from shoal.sync.base import Sync
from shoal.sync.compressed_sum import Copies
from shoal.sync.ddp import AllReduce
from shoal.sync.ddp_compressed import CompressedReduce
from shoal.sync.ddp_exact import ExactReduce
from shoal.sync.hogwild import Hogwild as HogwildSync
from shoal.sync.local import LocalUpdate
from shoal.sync.localsgd import LocalSgd
from shoal.sync.mapreduce import MapReduce
from shoal.sync.optimizer_step import NormOver, Update
from shoal.sync.ps.connect import join_servers
from shoal.sync.zero import ExactZero, ZeroReduce, norm_over, own_named

DEFAULT_BUCKET_BYTES = 25 << 20
SMALLEST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Replica:
    """What a sync works on: one replica's parameters, optimizer, and its peers."""

    flat: FlatParams
    update: Update
    group: Group
    exact_microbatches: int | None = None  # the same bits at any number of replicas
    statistics: Sequence[Tensor] = ()  # of BatchNorm, where replicas keep their own
    say: Callable[[str], None] = lambda sentence: None
    copies: Copies | None = None  # where a replica is split over workers
    fellows: Fellows = field(default_factory=Fellows)  # these workers


@dataclass(frozen=True)
class Ownership:
    """What this rank's optimizer updates, and how it learns the norm of the whole gradient."""

    named: list[tuple[str, nn.Parameter]]
    norm_over: NormOver | None = None
    clipped: list[nn.Parameter] | None = None


def place(
    part: SyncPart, model: nn.Module, group: Group, device: torch.device, is_split: bool = False
) -> Blank:
    """Bring the model to its device, filled.

    Where it is sharded that is left to `lay_out`; where a replica is split, to `part_of_replica`.
    """
    blank = Blank(model)
    left = bool(blank) if is_split else _shards_parameters(part, group)
    if not left:
        blank.fill_all(model)
        model.to(device)
    return blank


def lay_out(
    part: SyncPart,
    model: nn.Module,
    group: Group,
    device: torch.device,
    blank: Blank,
    named: Sequence[tuple[str, nn.Parameter]],
    stage: nn.Module | None,
) -> FlatParams:
    """The parameters of a replica, as the strategy keeps them; `named` are those of this worker."""
    if not _shards_parameters(part, group):
        return FlatParams(named)
    flat = ShardedParams(model, group, device, blank, named, stage)
    if stage is not None:  # it is on the device, and the rest of the model is nowhere
        return flat
    trained = {id(p) for p in flat.params}
    for module in model.modules():  # what is not sharded
        for p in module._parameters.values():
            if p is not None and id(p) not in trained:
                p.data = p.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return flat


def ownership(part: SyncPart, flat: FlatParams, group: Group, exact: bool) -> Ownership:
    if not isinstance(part, Zero):
        return Ownership(flat.named)
    named = own_named(flat, group)
    if exact:  # everybody has the whole gradient
        return Ownership(named, clipped=flat.params)
    return Ownership(named, norm_over(flat, group))


def _shards_parameters(part: SyncPart, group: Group) -> bool:
    return isinstance(part, Zero) and part.stage == 3 and group.size > 1


def build_sync(part: SyncPart, replica: Replica) -> Sync:
    """Chosen once, when a step is built; nothing asks again inside a step."""
    flat = replica.flat
    update = replica.update
    group = replica.group
    _check(part, replica)
    match part:
        case Single() | Ddp() if replica.exact_microbatches is not None:
            return ExactReduce(flat, update, group, replica.exact_microbatches, _bytes(part))
        case Single() | Hogwild() | Mapreduce() if group.size == 1:
            return LocalUpdate(flat, update)
        case Ddp(compress=None):
            return AllReduce(flat, update, group, _bytes(part))
        case Ddp(compress=str(compress)):
            return CompressedReduce(*(flat, update, group, _bytes(part), compress), replica.copies)
        case Localsgd(every=every, outer=outer, compress=compress):
            return LocalSgd(
                *(flat, update, group, every, outer, compress),
                *(replica.statistics, replica.copies),
            )
        case Gossip() if group.size == 1:
            return LocalUpdate(flat, update)
        case Gossip():
            from shoal.sync.gossip import build_gossip  # networkx: only where it is needed

            return build_gossip(part, flat, update, group, replica.statistics, replica.say)
        case Ps():
            return join_servers(
                *(part, flat, update, group, replica.exact_microbatches),
                *(replica.fellows, replica.copies),
            )
        case Zero() if update.scaler is not None:
            raise BadInput(f'{part} does not train with precision="fp16": take "bf16"')
        case Zero() if replica.exact_microbatches is not None:
            return ExactZero(flat, update, group, replica.exact_microbatches, _bytes(part))
        case Zero(stage=stage):
            return ZeroReduce(flat, update, group, stage, bytes_of_shards(flat, group.size))
        case Mapreduce():
            return MapReduce(flat, update, group, DEFAULT_BUCKET_BYTES)
        case Hogwild(momentum=momentum):
            return HogwildSync(flat, update, group, momentum, replica.statistics, replica.say)
    raise NotBuilt(f"{part} is not built yet: this version has no runtime for it")


def _check(part: SyncPart, replica: Replica) -> None:
    compress = getattr(part, "compress", None)
    apart = Localsgd | Gossip | Hogwild | Mapreduce
    if replica.exact_microbatches is not None and (compress or isinstance(part, apart)):
        raise BadInput(
            f"exact=True adds up every gradient in full, which {part} does not do: take ddp"
        )
    if compress and isinstance(part, Ddp | Ps) and replica.update.scaler is not None:
        raise BadInput(
            f'{part} and precision="fp16" exclude each other: the scale of such gradients changes '
            'between steps, and so would what is left to send; take precision="bf16"'
        )


def _bytes(part: SyncPart) -> int:
    return int(part.bucket_mb * (1 << 20)) if isinstance(part, Ddp) else DEFAULT_BUCKET_BYTES


def bytes_of_shards(flat: FlatParams, replicas: int) -> int:
    """Buckets that are small beside a shard, since they need memory of their own."""
    shard_bytes = flat.size * flat.data.element_size() // replicas
    return min(DEFAULT_BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, shard_bytes // 16))
