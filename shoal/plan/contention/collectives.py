"""Collectives on a cluster: every algorithm with contention, in closed form and simulated.

The closed form of a round: the alphas at its busiest port, and then its busiest link, the largest
of bytes over capacity. In the simulation flows share links fairly, message by message.
`alpha_beta_s` is the time without contention, if all messages took the path of the slowest pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.cluster import Cluster
from shoal.cluster.topology import ClusterTopology
from shoal.plan.contention.messages import (
    Floats,
    Longs,
    MessageTable,
    RoundTime,
    Routes,
    message_table,
    simulate_collective,
)
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.catalog import algorithms, build
from shoal.schedules.collectives.cost import Link, price

IN_ORDER = "contiguous"
AT_RANDOM = "random"
MOST_MESSAGES = 300_000  # in the distinct rounds of a schedule; beyond, closed forms only
MOST_ROUNDS = 1_500  # that differ
MOST_PAIRS = 2_000_000  # of ranks that send to each other; each has a path


@dataclass(frozen=True)
class ContendedPrice:
    """One algorithm, with its ranks in one order, on a cluster."""

    kind: str
    algorithm: str
    order: str  # of the ranks: contiguous in nodes and racks, or random
    ranks: int
    num_bytes: int
    alpha_beta_s: float
    closed_form_s: float
    simulated_s: float | None  # None: too many messages
    bound: str  # the link that is busy longest
    bound_bytes_per_s: float
    bound_bytes: float  # that it carries

    @property
    def seconds(self) -> float:
        return self.closed_form_s if self.simulated_s is None else self.simulated_s


class ClusterNetwork:
    """The first ranks of a cluster, in order or shuffled by a seed."""

    def __init__(self, cluster: Cluster, ranks: int, seed: int = 0):
        self.cluster = cluster.of_size(ranks)
        self.ranks = ranks
        self.topology = ClusterTopology(self.cluster)
        self.shuffled = list(range(ranks))
        random.Random(seed).shuffle(self.shuffled)
        self._routes = {
            IN_ORDER: Routes(self.cluster),
            AT_RANDOM: Routes(self.cluster, self.shuffled),
        }

    @property
    def has_levels(self) -> bool:
        """The ranks are in several nodes or racks, so that their order counts."""
        return self.ranks > self.cluster.node.devices

    @property
    def slowest_pair(self) -> tuple[float, float]:
        """Alpha and rate of the slowest pair of ranks, alone on its path."""
        others = range(1, self.ranks)
        alpha_s = max((self.topology.alpha_s(0, one) for one in others), default=0.0)
        rate = min((self.topology.bytes_per_s(0, one) for one in others), default=float("inf"))
        return alpha_s, rate

    def price(
        self, collective: Collective, num_bytes: int, order: str = IN_ORDER
    ) -> ContendedPrice:
        routes = self._routes[order]
        table = message_table(collective)
        chunk = collective.chunk_bytes(num_bytes)
        closed_s, carried = closed_form(table, chunk, routes)
        alpha_s, rate = self.slowest_pair
        bound: tuple[str, float, float] = ("", 0.0, 0.0)
        if carried.any():
            busiest = int(np.argmax(carried / routes.links))
            rates = (float(routes.links[busiest]), float(carried[busiest]))
            bound = (routes.name(busiest), *rates)
        can_be = _can_be_simulated(table)
        simulated_s = simulate_collective(collective, num_bytes, routes) if can_be else None
        return ContendedPrice(
            collective.kind,
            collective.name,
            order,
            collective.ranks,
            num_bytes,
            price(collective, num_bytes, Link(alpha_s, 1 / rate)).time_s,
            closed_s,
            simulated_s,
            *bound,
        )

    def price_all(self, kind: str, num_bytes: int) -> list[ContendedPrice]:
        """Every algorithm of a kind, and rings in random order; the fastest first."""
        found = []
        for one in self._collectives(kind):
            is_used = np.zeros((self.ranks, self.ranks), np.bool_)
            is_used[one.table.src, one.table.dst] = True
            if np.count_nonzero(is_used) <= MOST_PAIRS:
                found.append(self.price(one, num_bytes))
        if "ring" in algorithms(kind) and self.has_levels:
            found.append(self.price(build(kind, "ring", self.ranks), num_bytes, AT_RANDOM))
        return sorted(found, key=lambda one: one.seconds)

    def _collectives(self, kind: str) -> Iterator[Collective]:
        for name in algorithms(kind):
            if name == "hierarchical" and self.has_levels:
                yield hierarchical(self.cluster, self.ranks)
            else:
                yield build(kind, name, self.ranks)

    def crossings(self, order: str = IN_ORDER) -> int:
        """How often a ring leaves the rack that it leaves most often."""
        places = list(range(self.ranks)) if order == IN_ORDER else self.shuffled
        racks = [self.cluster.place(rank)[0] for rank in places]
        hops = zip(racks, [*racks[1:], racks[0]], strict=True)
        leaving = [one for one, other in hops if one != other]
        return max((leaving.count(rack) for rack in set(leaving)), default=0)


def hierarchical(cluster: Cluster, ranks: int) -> Collective:
    """In the levels that a cluster has: nodes of several devices, racks of several nodes."""
    devices = cluster.node.devices
    in_rack = (cluster.nodes_per_rack or cluster.nodes) * devices
    spans_racks = ranks > in_rack
    if devices == 1 and spans_racks:
        return build("all_reduce", "hierarchical", ranks, node=in_rack, outer="ring")
    options = {"rack": in_rack // devices} if spans_racks and in_rack > devices else {}
    return build("all_reduce", "hierarchical", ranks, node=devices, outer="ring", **options)


def closed_form(table: MessageTable, chunk: float, routes: Routes) -> RoundTime:
    """Seconds of all rounds, and the bytes that each link carries."""

    def timed(src: Longs, dst: Longs, sizes: Floats) -> RoundTime:
        ways = routes.ways(src, dst)
        held_s = ways.at_ports_s
        at_ports_s = max(np.bincount(src, held_s).max(), np.bincount(dst, held_s).max())
        alphas_s = at_ports_s + (ways.alphas_s - held_s).max()
        moved = _carried(ways.paths, sizes, routes)
        return float(alphas_s + (moved / routes.links).max()), moved

    messages = np.bincount(table.round, minlength=table.num_rounds)
    # the rounds of one message, of which `naive` has a million over 1,024 ranks, together
    single = messages[table.round] == 1
    ways = routes.ways(table.src[single], table.dst[single])
    paths = ways.paths
    sizes = table.chunks[single] * chunk
    slowest = np.append(1 / routes.links, 0.0)[paths].max(axis=1, initial=0.0)
    seconds = float(ways.alphas_s.sum() + (sizes * slowest).sum())
    alone = (seconds, _carried(paths, sizes, routes))
    return table.sum_rounds(np.flatnonzero(messages > 1).tolist(), chunk, timed, alone)


def _carried(paths: Longs, sizes: Floats, routes: Routes) -> Floats:
    """Bytes on each link; -1 fills up short paths."""
    on_path = np.repeat(sizes, paths.shape[1])
    counted = np.bincount(paths.ravel() + 1, on_path, minlength=routes.links.size + 1)
    return counted[1:].astype(np.float64)


def _can_be_simulated(table: MessageTable) -> bool:
    distinct: dict[tuple[bytes, bytes], int] = {}
    for number in range(table.num_rounds):
        rows = table.of_round(number)
        distinct[table.src[rows].tobytes(), table.dst[rows].tobytes()] = rows.stop - rows.start
        if len(distinct) > MOST_ROUNDS:
            return False
    return sum(distinct.values()) <= MOST_MESSAGES


def explain_racks(network: ClusterNetwork, prices: Sequence[ContendedPrice]) -> str:
    """Why the order of a ring counts, and what hierarchical changes; "" where nothing does."""
    cluster = network.cluster
    by_name = {(one.algorithm, one.order): one for one in prices}
    at_random = by_name.get(("ring", AT_RANDOM))
    in_order = by_name.get(("ring", IN_ORDER))
    levels = by_name.get(("hierarchical", IN_ORDER))
    if at_random is None or in_order is None:
        return ""
    often = network.crossings(AT_RANDOM)
    if often <= network.crossings():
        if cluster.node.nics < 2 or levels is None or levels.seconds >= in_order.seconds:
            return ""
        return (
            f"One ring leaves a node through one of its {cluster.node.nics} NICs; hierarchical "
            f"sends a share through each, and is {in_order.seconds / levels.seconds:.3g} times as "
            "fast."
        )
    text = (
        f"A ring in random order crosses the 1:{cluster.oversubscription:g} uplink of one rack "
        f"{often} times a round, and the {often} flows share it; in rack-contiguous order "
        f"{network.crossings()}: {_faster(in_order, at_random)}."
    )
    if levels is not None:
        text += " Hierarchical sends only one rack's share over the uplink: "
        text += f"{_faster(levels, at_random)}."
    return text


def _faster(one: ContendedPrice, other: ContendedPrice) -> str:
    closed = f"{other.closed_form_s / one.closed_form_s:.3g} times"
    if one.simulated_s is None or other.simulated_s is None:
        return f"by the closed form it is {closed} as fast as the random ring"
    simulated = f"{other.simulated_s / one.simulated_s:.3g} times"
    return f"it is {simulated} as fast as the random ring simulated, {closed} in closed form"
