"""Messages between ranks over the links of a topology.

A message first takes its alpha, then its bytes flow along the path of links. The alpha occupies
the sender's port out and the receiver's port in, as in `schedules.collectives.cost`: k messages at
one port begin to flow after k alphas. What is above 0.1 ms of an alpha is distance, on which any
number of messages are under way at once. Bytes share every link of their way fairly.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.cluster.hardware import AT_PORT_S
from shoal.cluster.topology import ClusterTopology
from shoal.schedules.collectives import Collective

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Flags = NDArray[np.bool_]
_SAME = 1e-9  # shares and moments that differ by this much, relatively, are the same


def max_min_rates(paths: Longs, capacities: Floats) -> Floats:
    """The rate of each flow; a row of `paths` has the links of a flow, padded with -1.

    A flow without links is not limited: its rate is infinite.
    """
    rates = np.full(len(paths), math.inf)
    limits = np.append(capacities, math.inf)  # the link of index -1
    left = limits.copy()
    waiting = np.arange(len(paths))
    while waiting.size:
        rows = paths[waiting]
        counts = np.bincount(rows.ravel() + 1, minlength=limits.size)
        counts = np.roll(counts, -1)  # index -1 last, as in `limits`
        shares = np.full(limits.size, math.inf)
        np.divide(left, counts, out=shares, where=counts > 0)
        shares[-1] = math.inf
        lowest = shares[rows].min(axis=1) if rows.shape[1] else np.full(waiting.size, math.inf)
        settled = _settled(rows, shares, lowest)
        rates[waiting[settled]] = lowest[settled]
        done = rows[settled]
        if done.shape[1] and np.isfinite(lowest[settled]).all():
            taken = np.repeat(lowest[settled], done.shape[1])
            left[:-1] -= np.bincount(done.ravel() + 1, taken, minlength=limits.size)[1:]
            np.maximum(left, 0.0, out=left)
        waiting = waiting[~settled]
    return rates


def _settled(rows: Longs, shares: Floats, lowest: Floats) -> Flags:
    """Flows whose narrowest link is the narrowest of all flows on it."""
    if not np.isfinite(lowest).all():
        return ~np.isfinite(lowest)
    on_narrower = np.zeros(shares.size, bool)  # links with a flow that is slower elsewhere
    slower = lowest[:, None] < shares[rows] * (1 - _SAME)
    on_narrower[rows[slower]] = True
    full = ~on_narrower
    full[-1] = False
    return np.asarray(full[rows].any(axis=1))


class FlowNetwork:
    """Flows in progress, each with its links. Tags are the caller's numbers for them."""

    def __init__(self, capacities: Floats):
        self.capacities = np.asarray(capacities, np.float64)
        self.carried_bytes = np.zeros(self.capacities.size)  # by link
        self.now_s = 0.0
        self._paths: Longs = np.empty((0, 1), np.int64)
        self._sizes: Floats = np.empty(0)
        self._left: Floats = np.empty(0)
        self._rates: Floats = np.empty(0)
        self._tags: Longs = np.empty(0, np.int64)
        self._changed = np.zeros(self.capacities.size + 1, bool)  # links; the last is padding
        self._known_rates = lru_cache(1024)(self._rates_of)  # steps are alike

    def __len__(self) -> int:
        return int(self._tags.size)

    def start(self, paths: Longs, sizes: Floats, tags: Longs) -> None:
        """Flows that begin now."""
        self._paths = stacked([self._paths, paths], -1)
        self._sizes = np.concatenate([self._sizes, sizes])
        self._left = np.concatenate([self._left, sizes])
        self._rates = np.concatenate([self._rates, np.zeros(len(sizes))])
        self._tags = np.concatenate([self._tags, tags])
        self._changed[paths.ravel()] = True
        on_links = np.repeat(sizes, paths.shape[1])
        links = self.capacities.size
        self.carried_bytes += np.bincount(paths.ravel() + 1, on_links, minlength=links + 1)[1:]

    def next_end_s(self) -> float:
        """When the next flow ends if none begins before; infinite where there are none."""
        if not self._tags.size:
            return math.inf
        self._refresh()
        return self.now_s + float(self._remaining_s().min())

    def advance(self, to_s: float) -> Longs:
        """Let time pass; the tags of the flows that have ended, in the order of their start."""
        if not self._tags.size:
            self.now_s = to_s
            return self._tags
        self._refresh()
        passed_s = to_s - self.now_s
        self.now_s = to_s
        ended = self._remaining_s() <= passed_s + _SAME * max(passed_s, to_s * 1e-3)
        moving = np.isfinite(self._rates)
        self._left[moving] -= self._rates[moving] * passed_s
        ended |= self._left <= _SAME * self._sizes
        return self._remove(ended)

    def _remove(self, ended: Flags) -> Longs:
        tags = self._tags[ended]
        self._changed[self._paths[ended].ravel()] = True
        for name in ("_paths", "_sizes", "_left", "_rates", "_tags"):
            setattr(self, name, getattr(self, name)[~ended])
        return tags

    def _remaining_s(self) -> Floats:
        found = np.zeros(self._left.size)
        np.divide(self._left, self._rates, out=found, where=np.isfinite(self._rates))
        return found

    def _refresh(self) -> None:
        """New rates for the flows that share links, or links of links, with what changed."""
        if not self._changed.any():
            return
        self._changed[-1] = False
        reached = self._changed[self._paths].any(axis=1) | (self._rates == 0.0)
        links = -1 if reached.all() else 0
        while links >= 0 and (now := int(np.count_nonzero(self._changed))) != links:
            links = now
            self._changed[self._paths[reached].ravel()] = True
            self._changed[-1] = False
            reached |= self._changed[self._paths].any(axis=1)
        paths = self._paths[reached]
        rates_of = self._known_rates if paths.nbytes < 1 << 15 else self._rates_of
        self._rates[reached] = rates_of(paths.tobytes(), paths.shape[1])
        self._changed[:] = False

    def _rates_of(self, paths: bytes, width: int) -> Floats:
        links = np.frombuffer(paths, np.int64).reshape(-1, width)
        return max_min_rates(links, self.capacities)


def stacked(parts: Sequence[NDArray[Any]], fill: float) -> NDArray[Any]:
    """Rows below each other, filled up to the longest."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([_widened(part, width, fill) for part in parts])


def _widened(rows: NDArray[Any], width: int, fill: float) -> NDArray[Any]:
    if rows.shape[1] == width:
        return rows
    wide = np.full((len(rows), width), fill, rows.dtype)  # np.pad takes 20 times as long
    wide[:, : rows.shape[1]] = rows
    return wide


class Ways(NamedTuple):
    """The links and ports that each of some messages takes."""

    paths: Longs  # padded with -1
    ports: Longs  # out and in; numbered behind the links
    alphas_s: Floats

    @property
    def at_ports_s(self) -> Floats:
        """What of the alphas occupies ports."""
        return np.minimum(self.alphas_s, AT_PORT_S)


class Routes:
    """Paths and alphas of a cluster as arrays.

    Pairs of ranks that lie alike have like paths, which are looked for once in a few nodes: on the
    same devices of their nodes, and in the same node, in the same rack, or in two. Links are those
    of racks, two each, and then those of nodes, as in `ClusterTopology`.
    `order[r]` is the device of the cluster that rank r of a group runs on.
    """

    def __init__(self, cluster: Cluster, order: Sequence[int] | None = None):
        self.cluster = cluster
        racks = cluster.racks if cluster.racks > 1 and cluster.node.nic is not None else 0
        nodes = 3 if cluster.racks > 1 else min(2, cluster.nodes)
        few = replace(cluster, nodes=nodes, nodes_per_rack=2 if cluster.racks > 1 else None)
        self._few = ClusterTopology(few)
        self._spine = 4 if racks else 0  # links of two racks
        self.first = 2 * racks
        self.each = (len(self._few.links) - self._spine) // nodes
        node = [link.bytes_per_s for link in self._few.links[self._spine :][: self.each]]
        uplinks = [cluster.uplink_bytes_per_s] * self.first
        self.links = np.array(uplinks + node * cluster.nodes, np.float64)
        self.capacities = np.append(self.links, np.ones(2 * cluster.devices))  # and ports
        self._order = None if order is None else np.asarray(order, np.int64)
        self._known: dict[int, int] = {}
        self._ends: Longs = np.empty((0, 1), np.int64)  # by kind of pair: whose link; -1 pads
        self._numbers: Longs = np.empty((0, 1), np.int64)  # among those of its node or rack
        self._alphas_s: list[float] = []

    def name(self, link: int) -> str:
        if link < self.first:
            return f"uplink of rack {link // 2}"
        node, number = divmod(link - self.first, self.each)
        name = self._few.links[self._spine + number].name.replace("node 0", f"node {node}")
        first = node * self.cluster.node.devices
        return re.sub(r"(?<=gpu )\d+", lambda gpu: str(first + int(gpu[0])), name)

    def ways(self, src: Longs, dst: Longs) -> Ways:
        """Of a message between each pair."""
        cluster = self.cluster
        devices = self.cluster.node.devices
        nodes = cluster.nodes_per_rack or cluster.nodes
        ports = np.stack([src, cluster.devices + dst], axis=1) + self.links.size
        if self._order is not None:
            src = self._order[src]
            dst = self._order[dst]
        (node, place), (other_node, other) = divmod(src, devices), divmod(dst, devices)
        rack = node // nodes
        other_rack = other_node // nodes
        apart = (node != other_node).astype(np.int64) + (rack != other_rack)
        pairs, kind = np.unique((apart * devices + other) * devices + place, return_inverse=True)
        rows = np.array([self._row(pair) for pair in pairs.tolist()], np.int64)[kind]
        starts = [node, other_node]
        bases = [self.first + self.each * one for one in starts] + [2 * rack, 2 * other_rack]
        ends = self._ends[rows]
        paths = np.take_along_axis(np.stack(bases, axis=1), np.maximum(ends, 0), axis=1)
        paths = np.where(ends < 0, -1, paths + self._numbers[rows])
        return Ways(paths, ports, np.array(self._alphas_s)[rows])

    def _row(self, pair: int) -> int:
        """Of a path from a device of node 0 to one of node 0, 1 (its rack) or 2 (another)."""
        if pair not in self._known:
            dst, src = divmod(pair, self.cluster.node.devices)
            path = self._few.path(src, dst)
            found = []  # whose link, and its number there: sender, receiver, rack up, rack down
            for link in path:
                node, number = divmod(link - self._spine, max(1, self.each))
                is_up = link < self._spine
                found.append((2 + link % 2, link % 2) if is_up else (min(node, 1), number))
            ends, numbers = np.array(found or [(-1, 0)], np.int64).T
            self._known[pair] = len(self._alphas_s)
            self._ends = stacked([self._ends, ends[None]], -1)
            self._numbers = stacked([self._numbers, numbers[None]], 0)
            self._alphas_s.append(sum(self._few.links[link].alpha_s for link in path))
        return self._known[pair]


class _Waiting(NamedTuple):
    """A message whose alpha is not over."""

    path: Longs
    num_bytes: float
    distance_s: float


class MessageNetwork:
    """Messages in progress: first alphas at ports and under way, then bytes on links."""

    def __init__(self, capacities: Floats):
        self._flows = FlowNetwork(capacities)
        self._waiting: dict[int, _Waiting] = {}  # by number
        self._under_way: list[tuple[float, int]] = []  # a heap: when it is there, and its number
        self._number = 0
        self._owner: dict[int, int] = {}  # the caller's tag of a flow of bytes or alphas

    @property
    def carried_bytes(self) -> Floats:
        """Bytes that each link has carried, or began to."""
        return self._flows.carried_bytes

    def start(self, ways: Ways, sizes: Floats, tags: Longs, repeats: Longs | None = None) -> None:
        """Messages that begin now; one that stands for many rounds takes `repeats` alphas."""
        times = 1 if repeats is None else repeats
        at_ports_s = ways.at_ports_s * times
        distances_s = (ways.alphas_s - ways.at_ports_s) * times
        numbers = np.arange(self._number, self._number + len(tags))
        self._number += len(tags)
        self._owner.update(zip(numbers.tolist(), tags.tolist(), strict=True))
        late = (at_ports_s > 0) | (sizes <= 0)
        waiting = map(_Waiting, ways.paths[late], sizes[late].tolist(), distances_s[late])
        self._waiting.update(zip(numbers[late].tolist(), waiting, strict=True))
        self._flows.start(ways.ports[late], at_ports_s[late], numbers[late])
        if not late.all():
            self._flows.start(ways.paths[~late], sizes[~late], numbers[~late])

    def next_end_s(self) -> float:
        end_s = self._flows.next_end_s()
        return min(end_s, self._under_way[0][0]) if self._under_way else end_s

    def advance(self, to_s: float) -> list[int]:
        """Let time pass up to the next end at most; the tags of messages that have arrived."""
        ended = [n for n in self._flows.advance(to_s).tolist() if not self._leaves_port(n, to_s)]
        while self._under_way and self._under_way[0][0] <= to_s:
            ended.append(heapq.heappop(self._under_way)[1])
        begun = [n for n in ended if n in self._waiting and self._waiting[n].num_bytes > 0]
        if begun:
            paths, sizes, _ = zip(*(self._waiting[n] for n in begun), strict=True)
            self._flows.start(
                stacked([path[None] for path in paths], -1),
                np.array(sizes, np.float64),
                np.array(begun),
            )
        going_on = set(begun)
        for number in ended:
            self._waiting.pop(number, None)
        return [self._owner.pop(number) for number in ended if number not in going_on]

    def _leaves_port(self, number: int, at_s: float) -> bool:
        """Whether a message whose flow has ended now has a distance before it."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.distance_s <= 0:
            return False
        heapq.heappush(self._under_way, (at_s + waiting.distance_s, number))
        return True


RoundTime = tuple[float, Floats]  # seconds, and the bytes that each link carries
TimeOfRound = Callable[[Longs, Longs, Floats], RoundTime]  # from src, dst and bytes


@dataclass(frozen=True)
class MessageTable:
    """The messages of a schedule, sorted by round: transfers of one pair travel as one."""

    ranks: int
    num_rounds: int
    round: Longs
    src: Longs
    dst: Longs
    chunks: Floats

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = np.searchsorted(self.round, np.arange(self.num_rounds + 1)).tolist()
        return starts

    def of_round(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def sum_rounds(
        self, numbers: Iterable[int], chunk: float, timed: TimeOfRound, before: RoundTime
    ) -> RoundTime:
        """These rounds of chunks of so many bytes, after others; equal ones are timed once."""
        known: dict[bytes, RoundTime] = {}
        seconds, carried = before
        for number in numbers:
            rows = self.of_round(number)
            columns = (self.src[rows], self.dst[rows], self.chunks[rows])
            key = b"".join(column.tobytes() for column in columns)
            if key not in known:
                known[key] = timed(columns[0], columns[1], columns[2] * chunk)
            took_s, moved = known[key]
            seconds += took_s
            carried += moved
        return seconds, carried


def message_table(collective: Collective) -> MessageTable:
    table = collective.table
    ranks = collective.ranks
    wire = table.src != table.dst
    when, src, dst = (c[wire].astype(np.int64) for c in (table.round, table.src, table.dst))
    key, chunks = np.unique((when * ranks + src) * ranks + dst, return_counts=True)
    return MessageTable(
        ranks,
        table.num_rounds,
        key // (ranks * ranks),
        key // ranks % ranks,
        key % ranks,
        chunks.astype(np.float64),
    )


def simulate_collective(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds of one call on vectors of `num_bytes`.

    Every message is a flow that shares links with the others of its round; a round begins when the
    one before has ended on all ranks. Equal rounds are simulated once, so that a ring over 1,024
    ranks is as cheap as one round of it.
    """
    table = message_table(collective)

    def timed(src: Longs, dst: Longs, sizes: Floats) -> RoundTime:
        network = MessageNetwork(routes.capacities)
        network.start(routes.ways(src, dst), sizes, np.arange(len(src)))
        end_s = 0.0
        while (at_s := network.next_end_s()) < math.inf:
            network.advance(at_s)
            end_s = at_s
        return end_s, network.carried_bytes[: routes.links.size]

    nothing = (0.0, np.zeros(routes.links.size))
    chunk = collective.chunk_bytes(num_bytes)
    return table.sum_rounds(range(table.num_rounds), chunk, timed, nothing)[0]
