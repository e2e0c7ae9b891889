"""Shards of a model: optimizer state is gathered, kept on several ranks, and moved between them.

a step     gradients of a shard are on its owner and on its copies; a barrier; then each of
           them makes the same update, and none communicates
a loss     before the barrier none has updated: the step is done again. Behind it all have the
           gradients: those that have not updated do so now. No update is undone
a change   the shards of the present ranks are staged beside the ones before; a barrier; swap.
           Who was interrupted has the staged ones if another rank has swapped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.objects import PytreeChannel
from shoal.errors import BadInput, ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.sharded_params import HeldShards, ShardedParams
from shoal.replica.optimizers import PARAM_KEYS
from shoal.runtime.pytree import map_tensors
from shoal.schedules.buffer_layout import shard_transfers, surviving_holders
from shoal.sync.optimizer_step import OptimizerStep, make_optimizer

State = dict[str, Any]


def gather_optimizer(
    update: OptimizerStep, flat: FlatParams, group: Group
) -> torch.optim.Optimizer | None:
    """On rank 0 an optimizer of all parameters with the state of all ranks; None elsewhere.

    All ranks call it, and send the state of their own shards. It takes memory for the state of the
    whole model on rank 0.
    """
    shards = flat.shards(group.size)
    channel = PytreeChannel(group, flat.device)
    groups = parameter_groups(update.optimizer, update.named)
    if group.rank != 0:
        pack = Packing(update)
        for i in flat.params_in(shards[group.rank]):
            channel.send(pack(*flat.named[i], flat.device), 0, _TAG).wait()
        return None
    optimizer = make_optimizer(update.factory, flat.named)
    for p in update.params:
        if p in update.optimizer.state:
            optimizer.state[p] = update.optimizer.state[p]
    for peer in range(1, group.size):
        for name, p in [flat.named[i] for i in flat.params_in(shards[peer])]:
            settings, state, _ = unpack(channel.recv(peer, _TAG), name)
            groups.append(settings)
            if state:
                optimizer.state[p] = map_tensors(Tensor.cpu, state)
    take_values(optimizer, {id(p): name for name, p in flat.named}, groups)
    return optimizer


class Packing:
    """What another rank needs to go on with a parameter; values that cannot be sent stay here."""

    def __init__(self, update: OptimizerStep):
        self._state = update.optimizer.state
        groups = parameter_groups(update.optimizer, update.named)
        self._groups = {name: group for group in groups for name in group["params"]}

    def __call__(self, name: str, p: nn.Parameter, device: torch.device) -> State:
        state = {k: sendable(v) for k, v in self._state.get(p, {}).items() if can_be_sent(v)}
        return {
            "group": {**self._groups[name], "params": [name]},
            "state": map_tensors(lambda t: t.detach().to(device), state),
            "on_host": [k for k, v in state.items() if isinstance(v, Tensor) and v.is_cpu],
        }


def unpack(message: Any, name: str) -> tuple[State, State, list[str]]:
    """The group of a parameter, its state, and which tensors of it belong on the host."""
    match message:
        case {"group": dict(group), "state": dict(state), "on_host": list(on_host)}:
            return group, state, on_host
    raise ShoalError(f"expected the state of {name} from another worker")


def parameter_groups(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> list[State]:
    """The groups with names of parameters instead of parameters; plain values only."""
    names = {id(p): name for name, p in named}
    return [
        {
            "params": [names[id(p)] for p in group["params"]],
            **{k: sendable(v) for k, v in group.items() if k not in PARAM_KEYS and _is_plain(v)},
        }
        for group in (optimizer.param_groups if named else ())
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def can_be_sent(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_plain(value)


def sendable(value: Any) -> Any:
    """Subclasses of plain types, such as numpy's floats, become plain."""
    if isinstance(value, (list, tuple)):
        return [sendable(item) for item in value]
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value


def take_values(
    optimizer: torch.optim.Optimizer, names: dict[int, str], groups: list[State]
) -> None:
    """Learning rates and the like are those of the rank that trains the parameters of a group."""
    trained = {name: group for group in groups for name in group["params"]}
    for group in optimizer.param_groups:
        source = trained.get(names[id(group["params"][0])], {}) if group["params"] else {}
        for key, value in source.items():
            if key in group and key != "params":
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


_TAG = 0
NOTHING_STAGED = (-1, 0, 1)
_CPU = torch.device("cpu")


class ShardProgress(NamedTuple):
    """How far a rank is with the shards of one model, for the others when the group has changed.

    A layout is the number of the group that shards are for, and the rank and size in it.
    """

    is_new: bool  # it has not trained, and holds nothing that others need
    steps: int
    layout: tuple[int, int, int]
    staged: tuple[int, int, int]  # what it is ready to change to; group -1: nothing
    is_open: bool = False  # its script is inside of a step whose update is done


@dataclass(frozen=True)
class StagedShards:
    """What a rank will hold: complete, and not in use yet."""

    generation: int
    held: HeldShards
    optimizer: torch.optim.Optimizer | None  # None: these shards have no parameter
    groups: list[State]
    data: Tensor | None  # of parameters, where they are sharded


class MovableShards:
    """`copies`: on how many ranks a shard is, besides its owner."""

    def __init__(self, flat: FlatParams, update: OptimizerStep, group: Group, copies: int):
        self.flat = flat
        self.update = update
        self.copies = copies
        self.held = HeldShards(self.flat, group.rank, group.size, copies)
        self._generation = 0  # of the group that these shards are for
        self._staged: StagedShards | None = None
        self.is_prepared = False  # gradients are here, and all ranks are about to update

    # ------------------------------------------------------------------ a step

    def update_together(self, group: Group) -> None:
        """All ranks update, or none of those that survive."""
        with self.update.tracer.span("update"):
            self.update.prepare()
            self.is_prepared = True
            group.barrier().wait()
            self._commit()

    def _commit(self) -> None:
        self.update.commit()
        self.is_prepared = False
        self.flat.zero_grad()

    # ------------------------------------------------------------------ after a change

    def progress(self, is_new: bool) -> ShardProgress:
        staged = self._staged
        return ShardProgress(
            is_new,
            self.update.steps,
            (self._generation, self.held.rank, self.held.ranks),
            NOTHING_STAGED
            if staged is None
            else (staged.generation, staged.held.rank, staged.held.ranks),
        )

    def settle(self, rows: Sequence[ShardProgress], rank: int) -> None:
        """Be as far as the others: those that have updated, or taken their present shards."""
        trained = [row for row in rows if not row.is_new]
        mine = rows[rank]
        if not mine.is_new and mine.steps < max(row.steps for row in trained):
            if not self.is_prepared:
                raise ShoalError(f"rank {rank} has no gradients of a step that others have done")
            self._commit()
        self.is_prepared = False
        latest = max(row.layout[0] for row in trained)
        if self._generation != latest and mine.staged[0] == latest:
            self.swap()

    def stage(self, rows: Sequence[ShardProgress], group: Group, generation: int) -> None:
        """Get the shards that this rank will hold; `rows` are as `settled` has them."""
        trained = [row for row in rows if not row.is_new]
        ranks = trained[0].layout[2]
        earlier_ranks = [None if row.is_new else row.layout[1] for row in rows]
        owners = HeldShards(self.flat, 0, ranks, self.copies).owners
        held_by = surviving_holders(owners, ranks, self.copies, earlier_ranks)
        for (name, _), holders in zip(self.flat.named, held_by, strict=True):
            if not holders:
                raise ShoalError(
                    f"too many workers were lost at once: all that had the optimizer state of "
                    f"{name}, which has copies={self.copies}; start again from the latest "
                    "checkpoint, or with more copies"
                )
        held = HeldShards(self.flat, group.rank, group.size, self.copies)
        if not isinstance(self.flat, ShardedParams):  # from those that have updated them
            works = [
                group.broadcast(self.flat.data[param.start : param.stop], root=sources[0])
                for param, sources in zip(self.flat.ranges, held_by, strict=True)
            ]
            for work in works:
                work.wait()
        kept = [i for i in held.params if group.rank in held_by[i]]
        self._staged = self._stage_kept(held, kept, generation)
        channel = PytreeChannel(group, _CPU)
        pack = Packing(self.update)
        for source, target, i in shard_transfers(held_by, held.owners, group.size, self.copies):
            if source == group.rank:
                channel.send(self._pack(pack, i), target, _TAG).wait()
            elif target == group.rank:
                self._unpack(self._staged, i, channel.recv(source, _TAG))

    def swap(self) -> None:
        """Use what was staged."""
        staged = self._staged
        assert staged is not None
        held = staged.held
        named = [self.flat.named[i] for i in held.params]
        counted = [self.flat.params[i] for i in self.flat.params_in(held.own)]
        self.update.take_shard(named, counted, staged.optimizer)
        take_values(self.update.optimizer, {id(p): name for name, p in named}, staged.groups)
        if isinstance(self.flat, ShardedParams) and staged.data is not None:
            self.flat.take_shards(held, staged.data)
        self.held = held
        self._generation = staged.generation
        self._staged = None

    # ------------------------------------------------------------------ one parameter

    def _stage_kept(self, held: HeldShards, kept: Sequence[int], generation: int) -> StagedShards:
        """With the parameters that this rank has held before."""
        named = [self.flat.named[i] for i in held.params]
        optimizer = make_optimizer(self.update.factory, named) if named else None
        data = None
        if isinstance(self.flat, ShardedParams):
            data = torch.zeros(held.size, dtype=self.flat.dtype, device=self.flat.device)
        for i in kept:
            p = self.flat.params[i]
            if optimizer is not None and p in self.update.optimizer.state:
                optimizer.state[p] = self.update.optimizer.state[p]
            if isinstance(self.flat, ShardedParams) and data is not None:
                held.view(i, data).copy_(self.flat.held_view(i))
        groups = parameter_groups(self.update.optimizer, self.update.named)
        return StagedShards(generation, held, optimizer, groups, data)

    def _pack(self, pack: Packing, i: int) -> State:
        name, p = self.flat.named[i]
        for key, value in self.update.optimizer.state.get(p, {}).items():
            if not can_be_sent(value):
                raise BadInput(
                    f"{type(self.update.optimizer).__name__} keeps {key} of {name} as a "
                    f"{type(value).__name__}, which workers of an elastic run cannot send each "
                    "other: use ddp(elastic=True)"
                )
        message = pack(name, p, _CPU)
        if isinstance(self.flat, ShardedParams):
            message["value"] = self.flat.held_view(i).detach().cpu()
        return message

    def _unpack(self, staged: StagedShards, i: int, message: Any) -> None:
        name, p = self.flat.named[i]
        group, state, on_host = unpack(message, name)
        assert staged.optimizer is not None
        staged.groups.append(group)
        if state:
            staged.optimizer.state[p] = {
                k: v if not isinstance(v, Tensor) or k in on_host else v.to(p.device)
                for k, v in state.items()
            }
        if staged.data is not None:
            staged.held.view(i, staged.data).copy_(message["value"])


def settled(rows: Sequence[ShardProgress]) -> list[ShardProgress]:
    """These rows after `settle`: a rank whose shards are staged for the present group has them."""
    latest = max(row.layout[0] for row in rows if not row.is_new)
    return [
        row._replace(is_new=False, layout=row.staged) if row.staged[0] == latest else row
        for row in rows
    ]
