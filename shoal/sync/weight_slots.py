"""Weights of replicas of one host, which neighbours read where they are.

    step t     slot t % 2 of each rank                   slot (t + 1) % 2
    update     its weights, by its own gradients
    mix        read, those of neighbours as well   ──▶   the weighted sum: the weights of step t + 1

A slot is written again a step later, when those who read it have told that they have mixed since.
"""

from __future__ import annotations

import mmap
from functools import partial

import torch
from torch import Tensor

from shoal.comm.objects import all_gather_bytes
from shoal.comm.transport.shm import memfd
from shoal.comm.transport.shm.memfd import Offer
from shoal.replica.flat_params import FlatParams
from shoal.replica.peer_sum import mix
from shoal.schedules.mixing import Mixing
from shoal.sync import Replica
from shoal.sync.shared_host import pays, whole_pages


class WeightSlots:
    """Two buffers of each rank: `flat` uses one of its own, and changes them in each step."""

    def __init__(self, flat: FlatParams, rank: int, slots: dict[int, list[Tensor]]):
        """`slots` of this rank and of those that it hears."""
        self._flat = flat
        self._slots = slots
        own = slots[rank]
        own[0].copy_(flat.data)
        self._rank = rank
        self._weights = [
            (slot, [flat.view(i, slot, 0) for i in range(len(flat.params))]) for slot in own
        ]
        self._use(0)

    @classmethod
    def of(cls, replica: Replica, mixing: Mixing, wanted: bool | None) -> WeightSlots | None:
        """None on all ranks, where they do not share a host or its memory is full.

        Each rank makes its own slots, near its cores, and opens those of its neighbours.
        """
        flat = replica.flat
        group = replica.group
        if not pays(flat, group, wanted):
            return None
        num_bytes = whole_pages(flat.data.nbytes)
        total_bytes = mmap.PAGESIZE + 2 * num_bytes
        steps = range(len(mixing.matrices))
        heard = {peer for step in steps for peer in mixing.heard_by(group.rank, step)}

        def attach(offers: list[Offer]) -> dict[int, list[Tensor]]:
            memories = {p: offers[p].map(total_bytes) for p in sorted({group.rank, *heard})}
            return {peer: slots_in(memory) for peer, memory in memories.items()}

        def slots_in(memory: mmap.mmap) -> list[Tensor]:
            return [flat.numbers_in(memory, mmap.PAGESIZE + at) for at in (0, num_bytes)]

        exchange = partial(all_gather_bytes, group)
        generation = memfd.new_generation()
        fd = memfd.make("shoal-weights", total_bytes, generation)
        slots = memfd.rendezvous(exchange, fd, attach, lambda found: found.clear(), generation)
        return None if slots is None else cls(flat, group.rank, slots)

    def mix(self, shares: dict[int, float], turn: int) -> None:
        """All who are heard have updated. Terms go in the order of ranks, as those of messages."""
        now = turn % 2
        other = 1 - turn % 2
        terms = [(self._slots[peer][now], share) for peer, share in shares.items()]
        total = self._slots[self._rank][other]
        if not mix(total, terms):
            (first, share), *rest = terms
            torch.mul(first, share, out=total)
            for slot, share in rest:
                total.add_(slot, alpha=share)
        self._use(other)

    def of_neighbours(self) -> list[Tensor]:
        return [s for peer, slots in self._slots.items() if peer != self._rank for s in slots]

    def _use(self, slot: int) -> None:
        self._flat.data, views = self._weights[slot]
        for p, view in zip(self._flat.params, views, strict=True):
            p.data = view
