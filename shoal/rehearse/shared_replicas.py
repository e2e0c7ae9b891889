"""Weights of virtual workers in memory that all of them read.

Under ddp all replicas have the same weights after each step. One memory has them, and each worker
maps it privately (copy on write), as workers of one host do (`sync/shared_weights.py`).

    backward   a large gradient is added to that of the others, and gives its memory back
    update     by the worker that comes to it first; the others find it done

Weights that a worker itself has written are noticed at its next gradients: it leaves with them.

Under synchronous ps the memory is that of the servers, which write while all workers wait: what
is pulled is there already. Under gossip each replica has two buffers that its neighbours read
(`sync/weight_slots.py`). Messages take as long as they would with all that they stand for.
"""

from __future__ import annotations

import copy
import mmap
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.transport.shm import memfd
from shoal.comm.transport.tcp.connect import require_open_files
from shoal.rehearse.executor import VirtualRanks
from shoal.replica.flat_params import FlatParams
from shoal.schedules.buffer_layout import LARGE_BYTES
from shoal.server.client.client import PullResult
from shoal.server.model.served_model import ServedModel
from shoal.server.process.server import Server
from shoal.sync.ddp import DdpSync, ExactReduce
from shoal.sync.gossip import TAG, MixWeights
from shoal.sync.ps.consistency import SynchronousPs
from shoal.sync.ps.push import UpdateOnServers
from shoal.sync.shared_host import PrivatePages, takes_slices, whole_pages
from shoal.sync.weight_slots import WeightSlots
from shoal.train.step.step import Step


class SharedReplicas:
    """Those of a rehearsal: the n-th step that a worker builds has the same model on all."""

    def __init__(self, ranks: VirtualRanks, servers: Sequence[Server]):
        self._ranks = ranks
        self._servers = servers
        self._built = Counter[int]()
        self._models: dict[int, SharedModel] = {}
        self._served: dict[int, ServedWeights] = {}
        self._slots: dict[tuple[int, int], list[Tensor]] = {}
        self._files: list[int] = []

    def join(self, rank: int, step: Step) -> None:
        self._built[rank] += 1
        number, sync = self._built[rank], step.sync
        if step.mesh.dp.size < step.mesh.world.size:
            return
        if type(sync) is MixWeights and sync.mixing.is_mutual:
            heard = sync.mixing.heard_by(sync.group.rank, 0)
            MixedInMemory(sync, {peer: self._slots_of(number, peer, step.flat) for peer in heard})
        elif isinstance(sync, SynchronousPs) and is_pulled_as_it_is(sync, self._servers):
            if number not in self._served:
                models = [server.host.models[sync.client.model] for server in self._servers]
                self._served[number] = ServedWeights(models, step.flat)
                self._files.append(self._served[number].fd)
            self._served[number].lend(sync)
        else:
            self._join_equal(rank, step)

    def _slots_of(self, number: int, rank: int, flat: FlatParams) -> list[Tensor]:
        if (number, rank) not in self._slots:
            self._slots[number, rank] = [torch.empty_like(flat.data) for _ in range(2)]
        return self._slots[number, rank]

    def _join_equal(self, rank: int, step: Step) -> None:
        model = self._models.get(self._built[rank])
        if model is None and _are_equal(step):
            require_open_files(2 * step.mesh.world.size)
            fd = memfd.make("shoal-rehearsal", whole_pages(step.flat.data.nbytes))
            if fd >= 0:
                self._files.append(fd)
                model = self._models[self._built[rank]] = SharedModel(self._ranks, step, fd)
        if model is not None:
            pages = PrivatePages(model.fd, 0, whole_pages(step.flat.data.nbytes))
            if pages.can_tell:  # on all workers, or on none
                SharedWorker(model, rank, step, pages)

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)


def _are_equal(step: Step) -> bool:
    """Whether replicas have the same bits after each step, and one update stands for all."""
    sync, update = step.sync, step.update
    return (
        type(sync) in (DdpSync, ExactReduce)  # zero updates a shard
        and step.mesh.world.size > 1
        and not step.term.is_elastic
        and update.scaler is None
        and takes_slices(update.optimizer)
    )


class _Total:
    """A gradient of all workers, added up in the order of ranks."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._next = 0
        self._waiting: dict[int, Tensor] = {}

    def add(self, rank: int, term: Tensor) -> None:
        """`term` has the memory of the total as soon as it is part of it."""
        self._waiting[rank] = term
        while (following := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            if self.value is None:
                self.value = following
            else:
                self.value.add_(following)
                following.set_(self.value)  # type: ignore[call-overload]


class SharedModel:
    """The memory of the weights, and what the workers do once for all of them."""

    def __init__(self, ranks: VirtualRanks, step: Step, fd: int):
        self.fd = fd
        memory = memfd.map_all(fd, whole_pages(step.flat.data.nbytes))
        self._weights = step.flat.numbers_in(memory)
        self._weights.copy_(step.flat.data)
        self.has_left = False  # a worker that has weights of its own
        self.is_merging = False
        self._ranks = ranks
        self._updates = step.update.steps
        self.state = [dict(step.update.optimizer.state.get(p, {})) for p in step.flat.params]
        self._step = -1
        self._totals: dict[tuple[int, int], _Total] = defaultdict(_Total)

    def merge(self, rank: int, step: Step, bucket: slice) -> None:
        """Add the gradients of a bucket that are large to those of the other workers."""
        if step.steps != self._step:  # the first worker that has some in this step
            self._totals.clear()
            self._step, self.is_merging = step.steps, not self.has_left
        grads = step.flat.grads
        of_buffer = grads.buffer.untyped_storage().data_ptr()
        for number, tensor in enumerate(grads.tensors[bucket.start] if self.is_merging else ()):
            if tensor.untyped_storage().data_ptr() != of_buffer:
                total = self._totals[bucket.start, number]
                total.add(rank, tensor)
                if total.value is not None:
                    self._ranks.totals[self, bucket.start, number] = total.value.data_ptr()

    def update(self, step: Step) -> None:
        """By the gradients of all workers, unless another one has done it."""
        update, flat = step.update, step.flat
        if update.steps < self._updates:
            update.take_settings(update.steps)
            update.steps += 1
            return
        own = flat.data
        flat.move_to(self._weights)
        give_state(step, self.state)
        update.prepare()
        update.commit()
        flat.move_to(own)
        self.state = [update.optimizer.state.pop(p, {}) for p in flat.params]
        self._updates = update.steps


class SharedWorker:
    """A worker whose weights are those of the model, until it writes into them."""

    def __init__(self, model: SharedModel, rank: int, step: Step, pages: PrivatePages):
        self._model, self._rank, self._step, self._pages = model, rank, step, pages
        self._looked = -1
        self._is_equal = True
        self._reduce = step.sync.reduce
        flat = step.flat
        flat.move_to(flat.numbers_in(pages.memory))
        step.update.optimizer.state.clear()
        if type(step.sync) is DdpSync and flat.data.nbytes >= LARGE_BYTES:
            rest = flat.numbers_in(mmap.mmap(-1, flat.data.nbytes))  # where nothing is, no memory
            flat.grads.watch(flat.grads.buckets, LARGE_BYTES, rest)
        step.sync.reduce = self._merge  # type: ignore[method-assign]
        step.update.apply = self._apply  # type: ignore[method-assign]

    def _merge(self, bucket: slice) -> None:
        if self._is_equal and self._looked != self._step.steps:
            self._looked = self._step.steps
            if self._pages.are_written():
                self._leave()
        self._model.merge(self._rank, self._step, bucket)
        self._reduce(bucket)

    def _leave(self) -> None:
        """No worker has begun the update of this step: it needs the gradients of this one."""
        self._is_equal, self._model.has_left = False, True
        self._step.flat.move_to(self._step.flat.data.clone())
        give_state(self._step, copy.deepcopy(self._model.state))
        self._pages.close()

    def _apply(self) -> None:
        update, model = self._step.update, self._model
        with update.tracer.span("update"):
            if model.has_left and model.is_merging:  # several updates, which clip them
                for p in self._step.flat.params:
                    p.grad = None if p.grad is None else p.grad.clone()
            if self._is_equal:
                model.update(self._step)
            else:
                update.prepare()
                update.commit()


def is_pulled_as_it_is(sync: SynchronousPs, servers: Sequence[Server]) -> bool:
    """Whether the weights of a worker are what these servers send, and nothing else."""
    is_plain = type(sync.updates) is UpdateOnServers and sync.updates.copies is None
    are_known = len(servers) == len(sync.client.links) and not servers[0].host.in_chain
    return is_plain and are_known and sync.client.shared_memory is None


class ServedWeights:
    """The weights of all servers of a model, in memory that workers map privately."""

    def __init__(self, models: Sequence[ServedModel], flat: FlatParams):
        num_bytes = whole_pages(flat.data.nbytes)
        self.fd = memfd.make("shoal-rehearsal", num_bytes)
        self._weights = flat.numbers_in(memfd.map_all(self.fd, num_bytes))
        for model in models:
            model.state.shard.move_to(self._weights[model.spec.start : model.spec.stop])

    def lend(self, sync: SynchronousPs) -> None:
        """A worker that writes into its weights takes copies of what it pulls from then on."""
        flat, client, take = sync.flat, sync.client, sync.updates.take
        pages = PrivatePages(self.fd, 0, whole_pages(flat.data.nbytes))
        client.inbox = self._weights
        if not pages.can_tell or not torch.equal(self._weights, flat.data):
            return
        flat.move_to(flat.numbers_in(pages.memory))

        def look(result: PullResult) -> None:
            if pages.are_written():
                flat.move_to(flat.data.clone())
                sync.updates.take = take  # type: ignore[method-assign]
                take(result)
            else:
                flat.zero_grad()

        sync.updates.take = look  # type: ignore[method-assign]


class MixedInMemory:
    """The weights of gossip, read where they are: the loss alone is in the messages."""

    def __init__(self, sync: MixWeights, slots: dict[int, list[Tensor]]):
        self._sync = sync
        self._slots = WeightSlots(sync.flat, sync.group.rank, slots)
        sync.mix = self._mix  # type: ignore[method-assign]

    def _mix(self) -> None:
        """As `gossip.MixInPlace`, with messages that are as long as the weights."""
        sync, flat, group = self._sync, self._sync.flat, self._sync.group
        weights = sync.mixing.heard_by(group.rank, sync.turn)
        own = (flat.grads.header[:1] * group.size).to(flat.dtype)
        losses = {peer: own.clone() for peer in weights}
        for peer in sync.mixing.listeners(group.rank, sync.turn):
            group.send(own.expand(flat.size), peer, TAG)
        works = [
            group.recv(loss.expand(flat.size), peer, TAG)
            for peer, loss in losses.items()
            if peer != group.rank
        ]
        for work in works:
            work.wait()
        if flat.header_fits:
            sync.heard_loss = torch.zeros_like(own[0])
            for peer, share in weights.items():  # in the order of ranks
                sync.heard_loss.add_(losses[peer][0], alpha=share)
        self._slots.mix(weights, sync.turn)


def give_state(step: Step, state: list[dict[str, Any]]) -> None:
    for p, values in zip(step.flat.params, state, strict=True):
        if values:
            step.update.optimizer.state[p] = values
