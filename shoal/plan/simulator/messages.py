"""Messages between ranks over the links of a topology.

A message first takes its alpha, then its bytes flow along the path of links. The alpha occupies
the sender's port out and the receiver's port in, as in `schedules.collectives.cost`: k messages at
one port begin to flow after k alphas. Bytes share every link of their way fairly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.cluster.topology import ClusterTopology
from shoal.plan.simulator.flows import Floats, FlowNetwork, Longs


class Routes:
    """Paths and alphas of a topology as arrays, found once for each pair of ranks.

    `order[r]` is the device of the cluster that rank r of a group runs on.
    """

    def __init__(self, topology: ClusterTopology, order: Sequence[int] | None = None):
        links = topology.links
        self.names = [link.name for link in links]
        self.capacities = np.array([link.bytes_per_s for link in links], np.float64)
        self._alphas = np.array([link.alpha_s for link in links], np.float64)
        self._topology = topology
        self._order = order
        self._rows: dict[tuple[int, int], int] = {}
        self._paths: list[Sequence[int]] = []
        self._table: Longs = np.empty((0, 1), np.int64)
        self._alpha_table: Floats = np.empty(0)

    def rows(self, src: Longs, dst: Longs) -> Longs:
        """The row in `paths` and `alphas_s` of each pair."""
        pairs = zip(src.tolist(), dst.tolist(), strict=True)
        found = [self._row(pair) for pair in pairs]
        if len(self._table) < len(self._paths):
            self._fill()
        return np.array(found, np.int64)

    def paths(self, rows: Longs) -> Longs:
        return self._table[rows]

    def alphas_s(self, rows: Longs) -> Floats:
        return self._alpha_table[rows]

    def _row(self, pair: tuple[int, int]) -> int:
        row = self._rows.get(pair)
        if row is None:
            src, dst = pair if self._order is None else (self._order[r] for r in pair)
            row = self._rows[pair] = len(self._paths)
            self._paths.append(self._topology.path(src, dst) if src != dst else ())
        return row

    def _fill(self) -> None:
        width = max(1, *(len(path) for path in self._paths))
        table = np.full((len(self._paths), width), -1, np.int64)
        for row, path in enumerate(self._paths):
            table[row, : len(path)] = path
        self._table = table
        self._alpha_table = np.append(self._alphas, 0.0)[table].sum(axis=1)


class MessageNetwork:
    """Messages in progress: first alphas at ports, then bytes on links."""

    def __init__(self, routes: Routes, ranks: int):
        self._routes = routes
        self._links = routes.capacities.size
        self._ranks = ranks
        self._flows = FlowNetwork(np.concatenate([routes.capacities, np.ones(2 * ranks)]))
        self._waiting: dict[int, tuple[int, float]] = {}  # by tag: the row of its path, its bytes
        self._tag = 0
        self._owner: dict[int, int] = {}  # the caller's tag of a flow of bytes or alphas

    @property
    def carried_bytes(self) -> Floats:
        """Bytes that each link has carried, or began to."""
        return self._flows.carried_bytes[: self._links]

    def start(
        self, src: Longs, dst: Longs, sizes: Floats, tags: Longs, repeats: Longs | None = None
    ) -> None:
        """Messages that begin now; one that stands for many takes `repeats` alphas."""
        rows = self._routes.rows(src, dst)
        alphas_s = self._routes.alphas_s(rows) * (1 if repeats is None else repeats)
        numbers = np.arange(self._tag, self._tag + len(tags))
        self._tag += len(tags)
        self._owner.update(zip(numbers.tolist(), tags.tolist(), strict=True))
        late = (alphas_s > 0) | (sizes <= 0)
        waiting = zip(rows[late].tolist(), sizes[late].tolist(), strict=True)
        self._waiting.update(zip(numbers[late].tolist(), waiting, strict=True))
        ports = np.stack([src, self._ranks + dst], axis=1) + self._links
        self._flows.start(ports[late], alphas_s[late], numbers[late])
        if not late.all():
            self._flow(rows[~late], sizes[~late], numbers[~late])

    def _flow(self, rows: Longs, sizes: Floats, numbers: Longs) -> None:
        self._flows.start(self._routes.paths(rows), sizes, numbers)

    def next_end_s(self) -> float:
        return self._flows.next_end_s()

    def advance(self, to_s: float) -> list[int]:
        """Let time pass up to the next end at most; the tags of messages that have arrived."""
        ended = self._flows.advance(to_s).tolist()
        begun = [n for n in ended if n in self._waiting and self._waiting[n][1] > 0]
        if begun:
            rows, sizes = zip(*(self._waiting[n] for n in begun), strict=True)
            self._flow(np.array(rows), np.array(sizes, np.float64), np.array(begun))
        going_on = set(begun)
        for number in ended:
            self._waiting.pop(number, None)
        return [self._owner.pop(number) for number in ended if number not in going_on]
