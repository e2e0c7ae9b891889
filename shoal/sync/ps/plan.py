"""The plan of `ps`: workers of a model whose weights live on servers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.replica.split.shard import ReplicaShard
from shoal.server.client.client import Client
from shoal.server.client.discovery import ServerSet, all_gather_text, find_or_start_servers
from shoal.server.client.started import device_of_server
from shoal.server.consistency import Rule, quorum_in_words
from shoal.server.messages import UNSPLIT, ModelSpec, ReplicaSplit
from shoal.server.model.named_optimizer import NamedOptimizer, name_of
from shoal.server.model.partition import FlatParameter, ServerSlice, partition
from shoal.server.model.shard import NAMES
from shoal.strategy.ps_term import Ps
from shoal.sync import CHANGING_SCALE, Replica, Sync, SyncPlan, runs
from shoal.sync.lasting import kept_statistics
from shoal.sync.ps import consistency
from shoal.sync.ps.push import (
    CompressedPush,
    ExactPush,
    GradientPush,
    InPlacePush,
    StagedPush,
    UpdateInPlace,
    UpdateOnServers,
    UpdateOnWorkers,
)
from shoal.sync.ps.worker import PsContext, PsWorker, ServerSaves


def join_servers(term: Ps, replica: Replica) -> PsWorker:
    """Find or start the servers, give them the model, and join as a worker.

    A replica may be split into shards. Under the synchronous rule each shard is a model of its
    own; under all others one leader decides for all shards.
    """
    rule = Rule.of(term, replica.group.size)
    if replica.config.server_checkpoint.folder is not None:
        term.check_server_saves(replica.replica_group.size)
    if term.on != "cpu":
        device_of_server(term)  # refuses a host without one, on every rank alike
    served = _served_model(term, replica, rule)
    if term.consistency != "strong":
        _check_eventual(term, served)
    if rule.quorum is not None:
        is_split = replica.replica_group.size > 1
        counted = "replica" if is_split else "worker"
        replica.say(quorum_in_words(rule, counted, replica.config.takes_back))
    if term.promise is not None:
        replica.say(term.promise)
    servers = find_or_start_servers(term, replica.group, replica.replica_group, replica.config)
    try:
        client = _join(replica, served, servers)
    except BaseException:
        servers.close(failed=True)
        raise
    statistics = None if rule.is_synchronous else kept_statistics(replica)
    context = PsContext(replica, client, servers, rule, statistics)
    worker = (_synchronous if rule.is_synchronous else _relaxed)(context, served)
    if replica.config.server_checkpoint.folder is not None:
        settings = replica.config.server_checkpoint
        worker.saves = ServerSaves(settings, client.model, replica.group.rank)
    return worker


# ---- what the servers are to hold ---------------------------------------------------------------


@dataclass(frozen=True)
class ServedOptions:
    """How servers treat a model; the same for all of them."""

    rule: Rule
    optimizer: NamedOptimizer | None = None  # None: the workers update
    clip_norm: float | None = None
    microbatches: int | None = None
    compress: str | None = None
    norm_from_workers: bool = False
    split: ReplicaSplit = UNSPLIT
    on: str = "cpu"  # where servers keep the weights


def _check_eventual(term: Ps, served: ServedOptions) -> None:
    """Refuse what needs every push of every step: the loss of a server may undo some."""
    needs = None
    if served.microbatches is not None:
        needs = "exact=True"
    elif served.norm_from_workers and served.clip_norm is not None:
        needs = "clip_norm where a replica is split over workers"
    if needs is not None:
        raise BadInput(
            f'{needs} needs every push of every step, and with consistency="{term.consistency}" '
            'the loss of a server may undo some: use consistency="strong"'
        )


def _served_model(term: Ps, replica: Replica, rule: Rule) -> ServedOptions:
    update = replica.update
    optimizer = None
    if term.update == "server":
        update.check_for_servers()
        optimizer = name_of(update.optimizer, update.params)
    return ServedOptions(
        rule,
        optimizer,
        update.clip_norm,
        replica.exact_microbatches,
        term.compress,
        norm_from_workers=update.grad_norm.over_replica is not None and rule.is_synchronous,
        split=ReplicaSplit(replica.replica_group.rank, replica.replica_group.size),
        on=term.on,
    )


def specs_of(flat: FlatParams, leaders: Sequence[str], served: ServedOptions) -> list[ModelSpec]:
    """What each server holds; `leaders` has the leader's address as each server reaches it."""
    optimizer = served.optimizer
    by_rows = served.microbatches is None and (optimizer is None or optimizer.is_elementwise)
    shards = 1 if served.rule.is_synchronous else served.split.shards
    first_index = 0 if served.rule.is_synchronous else served.split.shard * len(leaders)
    return [
        ModelSpec(
            first_index + index,
            shards * len(leaders),
            leaders[index],
            served.rule,
            NAMES[flat.dtype],
            NAMES[flat.grads.header.dtype],
            flat.size,
            held.start,
            held.stop,
            len(flat.params),
            held.slices,
            served.microbatches,
            optimizer,
            served.clip_norm if optimizer is not None else None,
            served.compress,
            served.norm_from_workers,
            served.split,
        )
        for index, held in enumerate(_partition(flat, len(leaders), by_rows))
    ]


def _partition(flat: FlatParams, servers: int, by_rows: bool) -> list[ServerSlice]:
    ranges = [
        FlatParameter(piece.name, piece.start, tuple(p.shape))
        for piece, p in zip(flat.ranges, flat.params, strict=True)
    ]
    return partition(ranges, flat.size, servers, by_rows)


# ---- joining ------------------------------------------------------------------------------------


def _join(replica: Replica, served: ServedOptions, servers: ServerSet) -> Client:
    """Connect to all servers. A shard of a split replica waits for the leader of shard 0."""
    own = str(secrets.randbits(62)).encode()
    model = int(servers.announcer.broadcast(replica.group, "the number of the model", own))
    shares_leader = _shares_leader(replica, served.rule)
    if shares_leader:
        servers.follow(replica.replica_group)
        served = replace(served, split=_following(replica, model))
    specs = specs_of(replica.flat, servers.leaders, served)
    if shares_leader and not replica.replica_group.is_leader:
        replica.replica_group.barrier()  # followers connect to a leader that listens already
    client = Client(
        replica.group.rank,
        model,
        servers.addresses,
        servers.secret,
        specs,
        replica.config,
        replica.update.tracer,
    )
    if shares_leader and replica.replica_group.is_leader:
        replica.replica_group.barrier()
    if served.on == "cuda" and replica.flat.device.type == "cuda" and served.compress is None:
        client.share_device(replica.flat.device)
    return client


def _shares_leader(replica: Replica, rule: Rule) -> bool:
    return replica.replica_group.size > 1 and not rule.is_synchronous


def _following(replica: Replica, model: int) -> ReplicaSplit:
    """This shard as a follower of shard 0, without parameters that other shards count."""
    group = replica.replica_group
    (leading,) = group.broadcast_integers([model])
    copies = replica.copies
    duplicates = [
        index
        for index, p in enumerate(replica.flat.params)
        if copies is not None and copies.is_duplicate(p)
    ]
    follows = None if group.is_leader else leading
    return ReplicaSplit(group.rank, group.size, follows, tuple(duplicates))


# ---- choosing -----------------------------------------------------------------------------------


def _synchronous(context: PsContext, served: ServedOptions) -> consistency.SynchronousPs:
    copies = context.replica.copies if served.compress is not None else None
    push = _push_of(context, served, copies)
    updates = _updates_of(context, served, copies)
    spec = context.client.specs[0]
    exchange = None
    if spec.norm_from_workers and spec.clip_norm is not None and context.replica.group.rank == 0:
        exchange = partial(consistency.exchange_norm, context, is_unequal=copies is not None)
    return consistency.SynchronousPs(context, push, updates, exchange)


def _relaxed(context: PsContext, served: ServedOptions) -> consistency.RelaxedPs:
    replica = context.replica
    client = context.client
    shares_leader = _shares_leader(replica, served.rule)
    copies = replica.copies if shares_leader or served.compress is not None else None
    push = _push_of(context, served, copies)
    updates = UpdateOnServers(replica.flat, replica.update, client, copies)
    if shares_leader:
        return consistency.RelaxedPs(
            context, push, updates, consistency.SharedLeader(client, replica.replica_group)
        )
    if served.rule.staleness is not None and not client.shares_memory:
        return consistency.PullAheadPs(context, push, updates, client)
    return consistency.RelaxedPs(context, push, updates, client)


def _push_of(
    context: PsContext, served: ServedOptions, copies: ReplicaShard | None
) -> GradientPush:
    flat = context.replica.flat
    client = context.client
    if served.compress is not None:
        return CompressedPush(flat, client, copies)
    if served.microbatches is not None:
        return ExactPush(flat, client, served.microbatches)
    if flat.device == client.out.device:
        return InPlacePush(flat, client, may_stay=served.optimizer is not None)
    return StagedPush(flat, client)


def _updates_of(
    context: PsContext, served: ServedOptions, copies: ReplicaShard | None
) -> UpdateOnServers:
    flat = context.replica.flat
    update = context.replica.update
    client = context.client
    if served.optimizer is None:
        return UpdateOnWorkers(flat, update, client, copies)
    if flat.device.type == "cpu" and copies is None and served.on == "cpu":
        return UpdateInPlace(flat, update, client, partial(all_gather_text, context.replica.group))
    return UpdateOnServers(flat, update, client, copies)


@runs(Ps)
class PsPlan(SyncPlan[Ps]):
    @property
    def can_be_exact(self) -> bool:
        return self.term.compress is None and self.term.lockstep

    def why_not_scaled(self, replicas: int) -> str | None:
        if self.term.update == "server" and not self.term.compress:
            return 'workers have to undo the scale of the loss, which ps(update="worker") does'
        return CHANGING_SCALE if self.term.compress else super().why_not_scaled(replicas)

    def build(self, replica: Replica) -> Sync:
        return join_servers(self.term, replica)
