"""How a worker comes to its servers: finds them, tells them what they hold, and joins."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.discovery import find_hosts
from shoal.server.model.named_optimizer import NamedOptimizer, name_of
from shoal.server.model.partition import FlatParameter, partition
from shoal.server.model.shard import NAMES
from shoal.server.protocol.messages import UNSPLIT, ModelSpec, ReplicaSplit
from shoal.strategy.terms import Ps
from shoal.sync.base import Copies, Replica
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.ps.split_replica import ServedPart
from shoal.sync.ps.worker import ParameterServer


def join_servers(part: Ps, replica: Replica) -> ParameterServer:
    """Find the servers, tell them what they hold, and give them the weights.

    Where everybody is waited for, each part of a split replica is a model of its own; else one
    lead decides for all of them.
    """
    flat = replica.flat
    update = replica.update
    group = replica.group
    microbatches = replica.exact_microbatches
    replica_group = replica.replica_group
    copies = replica.copies
    rule = Rule.of(part, group.size)
    named = _named(part, update)
    if microbatches is not None and not rule.is_synchronous:
        raise BadInput(f"exact=True needs every worker in every step, and {part} does not wait")
    has_one_lead = replica_group.size > 1 and not rule.is_synchronous
    hosts = find_hosts(part, group, replica_group)
    try:
        model = torch.tensor([secrets.randbits(62)])
        group.broadcast(model).wait()
        place = ReplicaSplit(replica_group.rank, replica_group.size)
        if has_one_lead:
            hosts.follow(replica_group)
            place = _place(flat, replica_group, int(model), copies)
        specs = specs_of(
            flat,
            rule,
            hosts.leads,
            named,
            update.clip_norm,
            microbatches,
            part.compress,
            norm_from_workers=update.total_norm is not None and rule.is_synchronous,
            place=place,
        )
        if has_one_lead and not replica_group.is_leader:
            replica_group.barrier()  # a server follows a lead that is there
        client = Client(group.rank, int(model), hosts.addresses, hosts.secret, specs)
        if has_one_lead and replica_group.is_leader:
            replica_group.barrier()
    except BaseException:
        hosts.close(failed=True)
        raise
    kind = ServedPart if has_one_lead else ParameterServer
    evened = copies if has_one_lead or part.compress is not None else None
    return kind(flat, update, group, client, hosts, rule, microbatches, evened, replica_group)


def _place(
    flat: FlatParams, replica_group: ReplicaGroup, model: int, copies: Copies | None
) -> ReplicaSplit:
    (followed,) = replica_group.broadcast_integers([model])
    held_elsewhere = [
        i for i, p in enumerate(flat.params) if copies is not None and copies.is_duplicate(p)
    ]
    follows = None if replica_group.is_leader else followed
    return ReplicaSplit(replica_group.rank, replica_group.size, follows, tuple(held_elsewhere))


def specs_of(
    flat: FlatParams,
    rule: Rule,
    leads: Sequence[str],
    named: NamedOptimizer | None,
    clip_norm: float | None,
    microbatches: int | None,
    compress: str | None = None,
    norm_from_workers: bool = False,
    place: ReplicaSplit = UNSPLIT,
) -> list[ModelSpec]:
    """What each server holds; `leads` says for each how it reaches the one that leads."""
    places = [
        FlatParameter(piece.name, piece.start, tuple(p.shape))
        for piece, p in zip(flat.ranges, flat.params, strict=True)
    ]
    by_rows = microbatches is None and (named is None or named.is_elementwise)
    parts = 1 if rule.is_synchronous else place.shards
    before = 0 if rule.is_synchronous else place.shard * len(leads)
    return [
        ModelSpec(
            before + index,
            parts * len(leads),
            leads[index],
            rule,
            NAMES[flat.dtype],  # type: ignore[arg-type]
            NAMES[flat.grads.header.dtype],  # type: ignore[arg-type]
            flat.size,
            held.start,
            held.stop,
            len(flat.params),
            held.slices,
            microbatches,
            named,
            clip_norm if named is not None else None,
            compress,
            norm_from_workers,
            place,
        )
        for index, held in enumerate(partition(places, flat.size, len(leads), by_rows))
    ]


def _named(part: Ps, update: OptimizerStep) -> NamedOptimizer | None:
    if part.update == "worker":
        return None
    if update.scaler is not None:
        raise BadInput(
            'precision="fp16" scales the loss, which the workers have to undo: use '
            'ps(update="worker") or precision="bf16"'
        )
    return name_of(update.optimizer, update.params)
