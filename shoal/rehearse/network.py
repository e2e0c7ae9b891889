"""Messages between the devices of a cluster, which share its links, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shoal.cluster import Cluster
from shoal.comm.executors.hierarchical.tcp_links import LINK, LONG_BYTES
from shoal.plan.contention.messages import MessageNetwork, Routes, message_table
from shoal.rehearse.virtual_time import VirtualTime
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.cost import cheapest


class VirtualMessage(NamedTuple):
    """`repeats`: it stands for so many rounds, and takes as many alphas."""

    src: int
    dst: int
    num_bytes: float
    repeats: int = 1


Phase = Sequence[VirtualMessage]  # they begin together; the next phase when all have arrived


class VirtualNetwork:
    """The links of a cluster. A device is where a worker or server runs."""

    def __init__(self, cluster: Cluster, time: VirtualTime):
        self.cluster = cluster
        self._time = time
        self._routes = Routes(cluster)
        self._messages = MessageNetwork(self._routes.capacities)
        # steps are alike
        self._ways = lru_cache(1024)(lambda *ends: self._routes.ways(*map(np.array, ends)))
        self._arrived: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._begun: list[tuple[int, VirtualMessage]] = []
        self._next_s: float | None = None
        time.sources.append(self)

    @property
    def link_bytes(self) -> dict[str, float]:
        """Of each link that is used; the one that needs the most time for them first."""
        carried = self._messages.carried_bytes[: self._routes.links.size]
        busiest_first = np.argsort(-carried / self._routes.links, kind="stable")
        return {
            self._routes.name(link): float(carried[link])
            for link in busiest_first.tolist()
            if carried[link]
        }

    def send(self, messages: Phase, arrived: Callable[[], None]) -> None:
        """Messages that begin now; `arrived` is called when the last of them has come."""
        leaving = [message for message in messages if message.src != message.dst]
        if not leaving:
            self._time.at(self._time.now_s, arrived)
            return
        missing = len(leaving)

        def one_less() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                arrived()

        for message in leaving:
            self._start(message, one_less)

    def _start(self, message: VirtualMessage, arrived: Callable[[], None]) -> None:
        self._begun.append((self._number, message))
        self._arrived[self._number] = arrived
        self._number += 1

    def send_phases(self, phases: Sequence[Phase], done: Callable[[], None]) -> None:
        """One after the other."""
        if not phases:
            self._time.at(self._time.now_s, done)
            return
        self.send(phases[0], lambda: self.send_phases(phases[1:], done))

    def next_s(self) -> float:
        if self._begun:
            self._begin()
        if self._next_s is None:
            self._next_s = self._messages.next_end_s()
        return self._next_s

    def advance(self, to_s: float) -> None:
        if to_s >= self.next_s():
            self._let_pass(to_s)

    def _begin(self) -> None:
        """All messages of this moment together: workers that are alike send at the same one."""
        begun = self._begun
        self._begun = []
        src, dst, sizes, repeats = zip(*(message for _, message in begun), strict=True)
        tags = np.array([tag for tag, _ in begun])
        self._let_pass(self._time.now_s)
        ways = self._ways(src, dst)
        self._messages.start(ways, np.array(sizes, np.float64), tags, np.array(repeats))
        self._next_s = None

    def _let_pass(self, to_s: float) -> None:
        self._next_s = None
        for tag in self._messages.advance(to_s):
            self._arrived.pop(tag)()


# ---------------------------------------------------------------------- collectives as phases

_SMALL_BYTES = 64 << 10  # of a broadcast: below, a tree; above, in pieces


@lru_cache(256)  # steps are alike
def phases_of(
    kind: str, ranks: tuple[int, ...], num_bytes: float, levels: tuple[int, ...]
) -> list[Phase]:
    """How a collective of Shoal's own executors moves; `ranks` are devices.

    `levels`: devices of a node, and those of a rack where there are racks.
    """
    size = len(ranks)
    if size == 1:
        return []
    match kind:
        case "all_reduce" | "reduce_scatter" | "all_gather":
            levels = levels if kind == "all_reduce" else levels[:1]
            return _by_levels(kind, ranks, num_bytes, levels)
        case "broadcast" | "reduce" if num_bytes > _SMALL_BYTES:
            return [ring(ranks, num_bytes, 2)]
        case "all_to_all" | "all_to_all_uneven":
            pairs = [(src, dst) for src in ranks for dst in ranks if src != dst]
            return [[VirtualMessage(src, dst, num_bytes / size) for src, dst in pairs]]
        case "gather":
            return [[VirtualMessage(src, ranks[0], num_bytes / size) for src in ranks[1:]]]
        case "scatter":
            return [[VirtualMessage(ranks[0], dst, num_bytes / size) for dst in ranks[1:]]]
    return _doubling(ranks, num_bytes)


def phases_of_schedule(
    collective: Collective, ranks: Sequence[int], num_bytes: float
) -> list[Phase]:
    """The rounds of a named algorithm."""
    table = message_table(collective)
    chunk = collective.chunk_bytes(int(num_bytes))
    phases: list[Phase] = []
    for number in range(table.num_rounds):
        rows = table.of_round(number)
        moves = zip(
            table.src[rows].tolist(),
            table.dst[rows].tolist(),
            table.chunks[rows].tolist(),
            strict=True,
        )
        phases.append(
            [VirtualMessage(ranks[src], ranks[dst], n * float(chunk)) for src, dst, n in moves]
        )
    return phases


def ring(ranks: Sequence[int], num_bytes: float, trips: int) -> Phase:
    rounds = trips * (len(ranks) - 1)
    size = rounds / len(ranks) * num_bytes
    neighbours = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return [VirtualMessage(src, dst, size, rounds) for src, dst in neighbours]


def _by_levels(
    kind: str, ranks: Sequence[int], num_bytes: float, levels: Sequence[int]
) -> list[Phase]:
    """Inside of nodes, between those of each place in a node, inside again; so with racks."""
    inside, *above = levels
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // inside, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    trips = 2 if kind == "all_reduce" else 1
    if len(nodes) == 1:
        return [ring(ranks, num_bytes, trips)]
    if len(sizes) > 1 or sizes == {1}:
        return _between(kind, ranks, num_bytes, above)
    share = num_bytes / sizes.pop()
    within = [message for node in nodes.values() for message in ring(node, num_bytes, 1)]
    columns = [_between(kind, one, share, above) for one in zip(*nodes.values(), strict=True)]
    between = [[m for phase in phases for m in phase] for phases in zip(*columns, strict=True)]
    return [within, *between, within] if trips == 2 else [within, *between]


def _between(
    kind: str, ranks: Sequence[int], num_bytes: float, levels: Sequence[int]
) -> list[Phase]:
    """Hosts: a ring, or racks first; what is short by the algorithm that they choose for it."""
    if num_bytes < LONG_BYTES:
        name = cheapest(kind, len(ranks), round(num_bytes), LINK)
        return phases_of_schedule(build(kind, name, len(ranks)), ranks, num_bytes)
    if levels:
        return _by_levels(kind, ranks, num_bytes, levels)
    return [ring(ranks, num_bytes, 2 if kind == "all_reduce" else 1)]


def _doubling(ranks: Sequence[int], num_bytes: float) -> list[Phase]:
    """A round for each doubling of distance, as in a tree or a dissemination."""
    phases: list[Phase] = []
    distance = 1
    while distance < len(ranks):
        ends = [(place, (place + distance) % len(ranks)) for place in range(len(ranks))]
        phases.append([VirtualMessage(ranks[src], ranks[dst], num_bytes) for src, dst in ends])
        distance *= 2
    return phases
