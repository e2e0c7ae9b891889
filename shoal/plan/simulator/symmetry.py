"""What is alike in simulated steps, so that one of many is simulated.

Ranks are in one class if they compute equally long and wait for like messages, flows if they begin
together and pass like links, links if as many flows of each class pass them. Flows of a class have
equal rates at every moment, and one stands for all: on a link it counts for as many of its class as
one such link carries (its loads).

At first all links of a rate are alike. Each time the tasks are laid out, links (and ranks of
pipelines) are told apart by the flows that they saw, until nothing is, or what tells them apart is
many links away. A collective that is alone on the network has link classes of its own. Every pair
of a worker and a server has a flow: there classes follow from what nodes and racks hold. Without
symmetry every class has one member, and the simulation goes message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.plan.simulator.messages import Floats, Longs, Routes, Ways, stacked

Colors = NDArray[np.uint64]
Made = TypeVar("Made")
MOST_TIMES = 12  # that tasks are laid out for more devices than MANY
MANY = 1024


def _mixed(numbers: Colors) -> Colors:
    """Other numbers for other numbers, as if drawn at random (splitmix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _joined(*columns: NDArray[Any]) -> Colors:
    """A color for each row of numbers."""
    found = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found = _mixed(found + _bits(column))
    return found


def _bits(column: NDArray[Any]) -> Colors:
    return column.view(np.uint64) if column.dtype == np.float64 else column.astype(np.uint64)


@dataclass(frozen=True, eq=False)
class Classes:
    """`of` has the class of each element; classes are numbered by their first elements."""

    of: Longs
    firsts: Longs
    sizes: Longs

    @classmethod
    def by(cls, colors: NDArray[Any]) -> Classes:
        _, firsts, of, sizes = np.unique(
            colors, return_index=True, return_inverse=True, return_counts=True
        )
        order = np.argsort(firsts)
        return cls(np.argsort(order)[of], firsts[order], sizes[order])

    def __len__(self) -> int:
        return int(self.firsts.size)


class Flow(NamedTuple):
    """A class of messages; `waits` are the classes of ranks that it waits for."""

    src: int
    dst: int
    size: float
    way: int  # its row in the ways of all classes; -1: it stays on its device
    waits: tuple[int, ...] = ()


class Round(NamedTuple):
    """Messages of a moment, and the classes of ranks when those that they wait for have come."""

    flows: Sequence[Flow]
    classes: Classes
    before: Sequence[int] = ()  # the class that each class was in
    arrived: Sequence[tuple[int, Sequence[int]]] = ()  # classes, and the flows that they wait for


Move = tuple[Longs, Longs, Floats]  # from, to, and shares of a vector, or chunks


class _Links:
    """The classes of links and ports in one part of the simulation."""

    def __init__(self, colors: Colors, can_split: bool):
        self._can_split = can_split
        self._split(colors)

    @classmethod
    def of(cls, capacities: Floats, is_on: bool) -> _Links:
        colors = _bits(capacities) if is_on else np.arange(capacities.size, dtype=np.uint64)
        return cls(colors, is_on)

    def _split(self, colors: Colors) -> None:
        self._colors = colors
        self.classes = Classes.by(colors)
        self.sums = np.zeros(colors.size + 1, np.uint64)  # the last is padding

    def pass_over(self, links: Longs, colors: Colors) -> None:
        if self._can_split:
            np.add.at(self.sums, links, colors[:, None])

    def is_stable(self) -> bool:
        """Whether what has passed over links tells none of a class apart."""
        if not self._can_split:
            return True
        colors = _joined(self._colors, self.sums[:-1])
        if np.unique(colors).size == len(self.classes):
            return True
        self._split(colors)
        return False


class Symmetry:
    """The classes of a simulation; tasks are laid out again until `is_stable`."""

    def __init__(self, routes: Routes, is_on: bool):
        self.routes = routes
        self.is_on = is_on
        cluster = routes.cluster
        self.devices = cluster.devices
        self._in_node = cluster.node.devices
        self._in_rack = (cluster.nodes_per_rack or cluster.nodes) * self._in_node
        self._spaces: dict[Hashable, _Links] = {}
        self._always: dict[Hashable, Any] = {}
        self._ranks = np.zeros(self.devices, np.uint64)  # told apart inside pipelines
        self._times = 0
        self.begin()

    def begin(self) -> None:
        """The next layout of tasks begins."""
        self._now: dict[Hashable, Any] = {}
        self._sums = np.zeros(self.devices, np.uint64)
        self._bases: dict[Hashable, int] = {}  # of each space, the number of its first class
        self._ways: list[Ways] = []
        self._num_links = self._num_flows = 0
        self._carried = np.zeros(self.routes.links.size)

    def carry(self, num_bytes: Floats) -> None:
        """What links carried of messages that are not among the classes of flows."""
        self._carried += num_bytes

    def is_stable(self) -> bool:
        """Whether nothing was told apart since `begin`, or only what many links lie between."""
        self._times += 1
        if self._times >= MOST_TIMES and self.devices > MANY:
            return True
        stable = [self._spaces[name].is_stable() for name in self._bases]
        if self.is_on and self._sums.any():
            before = np.unique(self._ranks).size
            self._ranks = _joined(self._ranks, self._sums)
            stable.append(np.unique(self._ranks).size == before)
        return all(stable)

    def known(self, key: Hashable, make: Callable[[], Made], lasting: bool = True) -> Made:
        """Made once, or once while tasks are laid out."""
        store = self._always if lasting else self._now
        if key not in store:
            store[key] = make()
        found: Made = store[key]
        return found

    def ranks(self, devices: Longs, *columns: NDArray[Any]) -> Classes:
        """Classes of these ranks by numbers that each device has."""
        colors = _joined(self._ranks, *columns) if self.is_on else np.arange(self.devices)
        return among(devices, colors)

    def ways(self) -> Ways:
        """Of all classes of flows, over classes of links."""
        if not self._ways:
            return self.routes.ways(np.zeros(0, np.int64), np.zeros(0, np.int64))
        *wide, alphas_s = zip(*self._ways, strict=True)
        paths, loads, ports, port_loads = (stacked(column, -1) for column in wide)
        return Ways(paths, loads, ports, port_loads, np.concatenate(alphas_s))

    def capacities(self) -> Floats:
        """Of all classes of links."""
        used = [self._spaces[name] for name in self._bases]
        return np.concatenate(
            [np.ones(0), *(self.routes.capacities[x.classes.firsts] for x in used)]
        )

    def link_bytes(self, carried: Floats) -> Floats:
        """What each link carried."""
        total = self._carried.copy()
        for name, base in self._bases.items():
            total += carried[base + self._spaces[name].classes.of[: total.size]]
        return total

    def round(
        self,
        space: Hashable,
        key: Hashable,
        move: Move,
        start: Classes,
        waits_for: Literal["both", "sender", "pair"] = "both",
    ) -> Round:
        """Messages that begin when both their ends have come so far, or only the sender has.

        Ends that had to come wait for the message; of a pair each class has its own ranks for good.
        """
        src, dst, sizes = move
        ways = self.known(("ways", key), lambda: self.routes.ways(src, dst))
        of = np.append(self._links(space)[1].classes.of, -1)
        ends = [src] if waits_for == "sender" else [src, dst]
        waits = np.stack([start.of[end] for end in ends])
        number = np.full(src.size, len(self._ways))
        colors = _joined(number, *waits, sizes, ways.alphas_s, *of[ways.paths].T, *of[ways.ports].T)
        kinds = Classes.by(colors)
        rows = self._rows(space, ways.only(kinds.firsts), kinds.sizes, (ways, colors))
        flows = [
            Flow(
                int(src[row]), int(dst[row]), float(sizes[row]), way, tuple(waits[:, row].tolist())
            )
            for way, row in zip(rows, kinds.firsts.tolist(), strict=True)
        ]
        if waits_for == "pair":
            np.add.at(self._sums, dst, colors)
            return Round(flows, start)
        at = np.concatenate([dst, *ends[:-1]])
        of_flow = np.tile(kinds.of, len(ends))
        come = np.zeros(self.devices, np.uint64)
        np.add.at(come, at, _joined(of_flow))
        classes = among(np.flatnonzero(start.of >= 0), _joined(start.of, come))
        pairs = np.unique(classes.of[at] * len(kinds) + of_flow)
        reached, begins = np.unique(pairs // len(kinds), return_index=True)
        waited, bounds = (pairs % len(kinds)).tolist(), [*begins.tolist(), pairs.size]
        slices = map(slice, bounds, bounds[1:])
        arrived = [(one, waited[row]) for one, row in zip(reached.tolist(), slices, strict=True)]
        return Round(flows, classes, start.of[classes.firsts].tolist(), arrived)

    def with_servers(
        self, space: Hashable, ranks: Classes, servers: Longs
    ) -> tuple[Classes, Classes]:
        """Classes of which all pairs of rank and server in one node, rack, or two are alike."""
        if not self.is_on:
            return ranks, Classes.by(np.arange(servers.size))
        device, links = np.arange(self.devices), self.routes
        held = _joined(
            ranks.of, np.bincount(servers, minlength=self.devices), device % self._in_node
        )
        of_node = _joined(held.reshape(-1, self._in_node).sum(axis=1))
        rack = np.arange(of_node.size) * self._in_node // self._in_rack
        of_rack = np.zeros(int(rack[-1]) + 1, np.uint64)
        np.add.at(of_rack, rack, of_node)
        of_node = _joined(of_node, of_rack[rack])
        colors = _joined(held, np.repeat(of_node, self._in_node))
        uplink, link = np.arange(links.first), np.tile(np.arange(links.each), of_node.size)
        found = [
            _joined(of_rack[uplink // 2], uplink % 2),
            _joined(np.repeat(of_node, links.each), link),
            _joined(colors, np.zeros(colors.size)),
            _joined(colors, np.ones(colors.size)),
        ]
        self._spaces[space] = _Links(np.concatenate(found), False)
        order = np.argsort(servers, kind="stable")
        turns = np.empty_like(order)  # of servers on one device
        turns[order] = np.arange(servers.size) - np.searchsorted(servers[order], servers[order])
        kinds = Classes.by(_joined(colors[servers], turns))
        return among(np.flatnonzero(ranks.of >= 0), colors), kinds

    def between(
        self, space: Hashable, ranks: Classes, servers: Longs, kinds: Classes, is_push: bool
    ) -> list[list[Flow]]:
        """By class of ranks: the flows of one of them to all servers, or from them."""
        pairs: list[tuple[int, int, int, int]] = []
        for number, (first, size) in enumerate(zip(ranks.firsts, ranks.sizes, strict=True)):
            near = sum(
                servers // part == first // part for part in (self._in_rack, self._in_node, 1)
            )
            _, at, counts = np.unique(kinds.of * 4 + near, return_index=True, return_counts=True)
            for server, count in zip(servers[at].tolist(), counts.tolist(), strict=True):
                pairs.append((number, int(first), server, int(size) * count))
        of, own, others, counts = (np.array(column) for column in zip(*pairs, strict=True))
        src, dst = (own, others) if is_push else (others, own)
        leaving = np.flatnonzero(src != dst)
        rows = np.full(of.size, -1)
        rows[leaving] = self._rows(
            space, self.routes.ways(src[leaving], dst[leaving]), counts[leaving]
        )
        found: list[list[Flow]] = [[] for _ in range(len(ranks))]
        columns = (column.tolist() for column in (of, src, dst, rows))
        for number, sender, receiver, row in zip(*columns, strict=True):
            found[number].append(Flow(sender, receiver, 1.0, row))
        return found

    def _links(self, space: Hashable) -> tuple[int, _Links]:
        """The links of a part of the simulation, and the number of the first of their classes."""
        if space not in self._spaces:
            self._spaces[space] = _Links.of(self.routes.capacities, self.is_on)
        links = self._spaces[space]
        if space not in self._bases:
            self._bases[space] = self._num_links
            self._num_links += len(links.classes)
            links.sums[:] = 0
        return self._bases[space], links

    def _rows(
        self, space: Hashable, ways: Ways, counts: Longs, seen: tuple[Ways, Colors] | None = None
    ) -> range:
        """Ways over classes of links, of one of so many flows; all of them were `seen`."""
        base, links = self._links(space)
        if seen is not None:
            links.pass_over(seen[0].paths, seen[1])
            links.pass_over(seen[0].ports, seen[1])

        def over(numbers: Longs) -> tuple[Longs, Floats]:
            of = links.classes.of[numbers]
            return np.where(numbers < 0, -1, of + base), counts[:, None] / links.classes.sizes[of]

        first = self._num_flows
        self._num_flows += len(counts)
        self._ways.append(Ways(*over(ways.paths), *over(ways.ports), ways.alphas_s))
        return range(first, self._num_flows)


def among(devices: Longs, colors: NDArray[Any]) -> Classes:
    """Classes of these; others are in class -1."""
    found = Classes.by(colors[devices])
    of = np.full(colors.size, -1)
    of[devices] = found.of
    return Classes(of, devices[found.firsts], found.sizes)
