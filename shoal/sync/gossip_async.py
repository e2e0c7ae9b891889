"""Asynchronous decentralized training on one host, and what it counts on several, too.

Each worker lays its weights out in memory that the others read
(`comm/transport/shm/rank_memory.py`). After an update of its own it averages with what its
neighbours have laid out since it last read them. The weight of a neighbour without a new version
goes to the worker's own weights. So a slow worker delays no other. One that has died is left out:
its neighbours keep its weight themselves. On several hosts: `gossip_pairs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.comm.transport.shm.rank_memory import Bytes, VersionedPages, page_bytes
from shoal.runtime.trace import MIX
from shoal.schedules.mixing import Mixing
from shoal.sync import Comeback, Replica
from shoal.sync.lasting import InRankMemory, aligned_bytes, views_in
from shoal.sync.replica_mean import kept

MEASURE_EVERY = 50  # steps from one measurement of the distance to neighbours to the next, at most


class NeighbourNews:
    """Counts what a worker reads of its neighbours, and how far their weights are from its own."""

    rank: int

    def count_news(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.steps = self.bytes_sent = self.bytes_read = 0
        self.joined_at = 0  # the steps that others had done before
        self.lost: set[int] = set()
        self.reads = self.behind = self.most_behind = 0  # how many, and by how many steps late
        self.distances: list[tuple[int, float]] = []
        self.measure_at = 1

    def note_read(self, num_bytes: int, late: int) -> None:
        """The weights of a neighbour that is so many steps behind."""
        self.bytes_read += num_bytes
        self.reads = self.reads + 1
        self.behind = self.behind + max(0, late)
        self.most_behind = max(self.most_behind, late)

    def note_distance(self, step: int, apart: Sequence[float]) -> None:
        self.measure_at = step + min(step, MEASURE_EVERY)
        self.distances.append((step, sum(apart) / len(apart)))

    def report(self) -> dict[str, Any]:
        return {
            "graph": self.mixing.name,
            "second_eigenvalue": self.mixing.second_eigenvalue,
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "bytes_per_step": self.bytes_sent / max(1, self.steps - self.joined_at),
            "bytes_read": self.bytes_read,
            "lost": sorted(self.lost),
            "steps_behind": self.behind / max(1, self.reads),
            "most_steps_behind": self.most_behind,
            "distance_to_neighbours": [list(pair) for pair in self.distances],
        }

    def summary(self) -> list[str]:
        if not self.reads:
            return []
        return [
            f"gossip: what rank {self.rank} read of its neighbours was "
            f"{self.behind / self.reads:.1f} steps behind on average, {self.most_behind} at most"
        ]


class AsyncGossip(NeighbourNews, InRankMemory):
    """A step writes the parameters once and reads those of the neighbours that are new.

    The weights that count are the mean of all workers that have not died, when they have come as
    far as this one, and so are BatchNorm's statistics. The optimizer's state is that of the worker
    that saves.
    """

    def __init__(self, replica: Replica, mixing: Mixing):
        flat = replica.flat
        self._tensors = [flat.data, *replica.statistics]
        self._page = Page(self._tensors)
        num_bytes = self._page.bytes.nbytes
        super().__init__(replica, replica.group.size * page_bytes(num_bytes), lambda memory: None)
        self.pages = VersionedPages(self.ranks, num_bytes)
        self.count_news(mixing)
        self.gradient_scale = float(self.size)
        self._seen = [0] * self.size
        self._others = torch.empty_like(flat.data)
        self._loss: Tensor | None = None
        flat.grads.records_loss = True

    def spread(self) -> None:
        data = self.flat.data
        has_room = self.flat.header_fits
        if has_room:
            data[0] = self.flat.grads.header[0] * self.size
        told = "average with what neighbours have laid out"
        with self.update.tracer.span(MIX, told) as more:
            self._mix()
            steps = max(self.next_steps, self.update.steps)  # none is done twice
            self.ranks.job_steps[self.rank] = steps
            self._lay_out()
            if more is not None:
                more["bytes"] = self._page.bytes.nbytes
        if has_room:
            self._loss = data[0].clone()
            data[0] = 0.0
        self.steps += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        """Its own and, as far as it has read them, its neighbours' loss."""
        return local_loss * self.size if self._loss is None else self._loss

    def after_load(self) -> None:
        self._lay_out()

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with kept(self._tensors):
            mine = self.pages.version(self.rank)
            self._wait_for(lambda peer: self.pages.version(peer) < mine)
            self._take_mean()
            self.lowest_survivor = min(set(self._present()) - self.lost)
            yield

    # ------------------------------------------------------------------ workers that come back

    def come_back(self) -> Comeback | None:
        """None where the other workers have not begun to train."""
        if not self._is_away or not self.pages.latest():
            return None
        found = self._take_place()
        self.steps = self.joined_at = found.step
        return found

    def catch_up(self) -> None:
        """Begin with the mean of the others, as new as theirs."""
        self._take_mean(with_own=False)
        self._lay_out(at_least=self.pages.latest())

    def shared_bytes(self) -> int:
        return page_bytes(self._page.bytes.nbytes)

    def _mix(self) -> None:
        """x_i = (1 - what was taken) x_i + sum of w[i, j] x_j over neighbours with news."""
        data = self.flat.data
        taken = 0.0
        apart = []
        others = self._others.zero_()
        for peer, weight in self.mixing.heard_by(self.rank, self.steps).items():
            theirs = None if peer == self.rank else self._read_news(peer)
            if theirs is not None:
                if self.steps + 1 >= self.measure_at:
                    apart.append(float((theirs - data)[self.flat.offset :].norm()))
                others.add_(theirs, alpha=weight)
                taken += weight
        if apart:
            self.note_distance(self.steps + 1, apart)
        data.mul_(1 - taken).add_(others)

    def _read_news(self, peer: int) -> Tensor | None:
        version = self.pages.read(peer, self._page.bytes, self._seen[peer])
        if version is None:
            self._note_loss_of(peer)
            return None
        self._seen[peer] = version
        self.note_read(self._page.bytes.nbytes, self.pages.version(self.rank) - version)
        return self._page.views[0].to(self.flat.device)

    def _lay_out(self, at_least: int = 0) -> None:
        for view, tensor in zip(self._page.views, self._tensors, strict=True):
            view.copy_(tensor)
        self.pages.write(self._page.bytes, at_least)
        self.bytes_sent += self._page.bytes.nbytes

    def _note_loss_of(self, peer: int) -> None:
        if self.ranks.has_died(peer):
            self.lost.add(peer)
        else:
            self.lost.discard(peer)

    def _take_mean(self, with_own: bool = True) -> None:
        totals = [tensor * with_own for tensor in self._tensors]
        count = int(with_own)
        present = self._present()
        for peer in range(self.size):
            self._note_loss_of(peer)
            if peer in self.lost or peer == self.rank or peer not in present:
                continue
            if self.pages.read(peer, self._page.bytes) is not None:
                count += 1
                for total, view in zip(totals, self._page.views, strict=True):
                    total.add_(view.to(total.device))
        for tensor, total in zip(self._tensors, totals, strict=True):
            if count:
                tensor.copy_(total.div_(count))


class Page:
    """Host memory for a copy of some tensors: as bytes, and as tensors of their shapes."""

    memory_column: ClassVar[str] = "copies"

    def __init__(self, tensors: Sequence[Tensor]):
        page = torch.zeros(aligned_bytes(t.nbytes for t in tensors), dtype=torch.uint8)
        self.bytes: Bytes = page.numpy()
        self.views = views_in(page, tensors)
