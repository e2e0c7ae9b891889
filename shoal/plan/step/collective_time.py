"""How long a collective takes on a group of ranks of a cluster: closed forms with contention.

All groups of an axis communicate at the same time. A ring in rank order over k nodes with q of its
ranks in each passes every node's boundary once in each direction; G groups share a node, so each
gets 1/G of the node's network rate, and the uplinks of a rack carry as many flows as groups leave
it. The slowest hop sets the pace of the ring:

    all_reduce       2(p-1) alpha + 2(p-1)/p V / rate
    reduce_scatter     (p-1) alpha +  (p-1)/p V / rate        all_gather, reduce: the same

A piece goes round the ring, so alpha is the mean of its hops: k of p are between nodes. GPUs also
have NCCL's two binary trees over nodes, each for half of V: 2 log2(k) alpha + 2 V / rate; to
reduce to one rank takes half of that.

`hierarchical` reduces inside nodes first, so that only 1/q of V crosses between nodes.

How the groups of an axis lie on nodes, or on racks: which of their ranks share one.

Groups are ranks f, f + stride, …; all ranks of the cluster are in one. Where strides and sizes fit
the places all groups lie alike. Else every group is looked at, and the worst one counts: a group
that crosses a border is as slow as its hop there, and all others wait for it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shoal.cluster import Cluster
from shoal.cluster.hardware import alphas_at_once
from shoal.cluster.units import show_rate
from shoal.errors import BadInput
from shoal.strategy.strategy import Layout

SHOAL_ORDER = ("tp", "cp", "ep", "pp", "dp")  # innermost first
MEGATRON_ORDER = ("tp", "cp", "ep", "dp", "pp")


class RankGroup(NamedTuple):
    """Ranks first, first + stride, …; every rank of the cluster is in one such group."""

    size: int
    stride: int


def axis_sizes(layout: Layout) -> dict[str, int]:
    return {
        "dp": layout.replicas,
        "pp": layout.pp,
        "tp": layout.tp,
        "ep": layout.ep,
        "cp": layout.cp,
    }


def group_of(layout: Layout, axis: str, order: tuple[str, ...] = SHOAL_ORDER) -> RankGroup:
    """The ranks of one group of an axis."""
    sizes = axis_sizes(layout)
    inner = order[: order.index(axis)]
    return RankGroup(sizes[axis], math.prod(sizes[name] for name in inner))


class GroupPlaces(NamedTuple):
    inside: int  # the most ranks of one group in one place, of groups that are in several
    is_even: bool  # every group has as many ranks in each place where it has one
    leaving: int  # hops of rings in rank order that leave the busiest place
    leaving_pairs: float  # pairs (rank here, rank of its group elsewhere) of the busiest place

    @property
    def is_apart(self) -> bool:
        """Whether a group is in several places."""
        return self.leaving > 0


@lru_cache(maxsize=100_000)
def group_places(group: RankGroup, devices: int, total: int) -> GroupPlaces:
    """Places of so many devices each; `total` devices in the cluster."""
    size, stride = group
    extent = size * stride
    if devices % extent == 0:
        return GroupPlaces(size, True, 0, 0.0)
    if stride % devices == 0:
        return GroupPlaces(1, True, devices, float(devices * (size - 1)))
    if devices % stride == 0 and extent % devices == 0:
        inside = devices // stride
        return GroupPlaces(inside, True, stride, float(devices * (size - inside)))
    return _looked_at(group, devices, max(total, extent))


def _looked_at(group: RankGroup, devices: int, total: int) -> GroupPlaces:
    size, stride = group
    extent = size * stride
    blocks = min(math.lcm(extent, devices) // extent, max(1, total // extent))
    firsts = (np.arange(blocks)[:, None] * extent + np.arange(stride)).reshape(-1, 1)
    place = (firsts + np.arange(size) * stride) // devices  # of each group's ranks
    leaves = place != np.roll(place, -1, axis=1)
    if not leaves.any():
        return GroupPlaces(size, True, 0, 0.0)
    _, of, numbers = np.unique(
        place + firsts * (place.max() + 1), return_inverse=True, return_counts=True
    )
    beside = numbers[of].reshape(place.shape)  # ranks of its group, with it
    apart = leaves.any(axis=1)
    elsewhere = np.bincount(place.ravel(), (size - beside).ravel())
    return GroupPlaces(
        inside=int(beside[apart].max()),
        is_even=bool((beside == beside[0, 0]).all()),
        leaving=int(np.bincount(place[leaves]).max()),
        leaving_pairs=float(elsewhere.max()),
    )


class CollectiveTime(NamedTuple):
    seconds: float
    bound: str  # the narrowest link, in words, or the latency of messages
    messages: int = 0  # one after the other, where their latency is most of the time


class RingHop(NamedTuple):
    """One hop of a ring at its level of the cluster: the rate that one group gets."""

    level: str
    bytes_per_s: float
    alpha_s: float

    @property
    def words(self) -> str:
        return f"{self.level} ({show_rate(self.bytes_per_s)})"


class Network:
    """The links of a cluster, with what was asked of them before."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.shared: dict[tuple[Any, ...], Any] = {}  # of questions that have much in common
        self._known: dict[tuple[str, RankGroup, float], CollectiveTime] = {}

    def collective(self, kind: str, group: RankGroup, num_bytes: float) -> CollectiveTime:
        key = (kind, group, num_bytes)
        if key not in self._known:
            self._known[key] = collective_time(self.cluster, kind, group, num_bytes)
        return self._known[key]

    def send(self, group: RankGroup, num_bytes: float) -> CollectiveTime:
        """One message to the next rank of a group, while all ranks of the cluster do the same."""
        return self.collective("send", group, num_bytes)


def on_nodes(cluster: Cluster, group: RankGroup) -> GroupPlaces:
    """How the groups of an axis lie on nodes."""
    return group_places(group, cluster.node.devices, cluster.devices)


def on_racks(cluster: Cluster, group: RankGroup) -> GroupPlaces:
    nodes = cluster.nodes_per_rack or cluster.nodes
    if cluster.racks == 1:
        return GroupPlaces(group.size, True, 0, 0.0)
    return group_places(group, nodes * cluster.node.devices, cluster.devices)


def hops(cluster: Cluster, group: RankGroup) -> tuple[RingHop, ...]:
    """The kinds of hops that a ring in rank order makes, from the innermost level outwards."""
    places = on_nodes(cluster, group)
    found = []
    if places.inside > 1:
        found.append(_inside(cluster, places.inside))
    if places.is_apart:
        node = cluster.node
        nic = cluster.node.nic
        assert nic is not None  # of several nodes
        rate = node.nics * nic.rate / places.leaving
        if node.fabric is None and node.pcie is not None:
            rate = min(rate, node.pcie_bytes_per_s)
        found.append(RingHop(nic.name, rate, nic.alpha_s))
        racks = on_racks(cluster, group)
        if racks.is_apart:  # what leaves a rack shares its uplinks; a ring leaves it once a group
            words = f"spine uplink 1:{cluster.oversubscription:g}"
            rate = cluster.uplink_bytes_per_s / racks.leaving
            found.append(RingHop(words, rate, nic.alpha_s + cluster.uplink_alpha_s))
    return tuple(found)


def _inside(cluster: Cluster, inside: int) -> RingHop:
    node = cluster.node
    if node.fabric is not None:
        rate = node.fabric.rate
        if node.fabric.shared:
            rate /= max(1, node.devices // inside)
        return RingHop(node.fabric.name, rate, node.fabric.alpha_s)
    if node.pcie is None:
        raise BadInput(f"cluster {cluster.name}: its node has neither a fabric nor pcie")
    return RingHop(node.pcie.name, node.pcie_bytes_per_s, node.pcie.alpha_s)


def collective_time(
    cluster: Cluster, kind: str, group: RankGroup, num_bytes: float
) -> CollectiveTime:
    """The faster of a ring and, for an all-reduce over several nodes, the hierarchical one."""
    if group.size <= 1:
        return CollectiveTime(0.0, "")
    measured = _measured(cluster, kind, group, num_bytes)
    if measured is None and kind == "reduce":
        measured = _measured(cluster, "reduce_scatter", group, num_bytes)
    if measured is not None:
        return measured
    if kind == "all_to_all":
        return _called(cluster, _all_to_all(cluster, group, num_bytes))
    if kind == "send":
        way = hops(cluster, group)
        return max(_bounded(hop.alpha_s, num_bytes / hop.bytes_per_s, hop.words, 1) for hop in way)
    rings, trees = _ways(cluster, kind, group, num_bytes)
    return _called(cluster, min([*rings, *trees]))


def _ways(
    cluster: Cluster, kind: str, group: RankGroup, num_bytes: float
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """In rings, flat or by levels, and over trees where there are some."""
    trips = 2 if kind == "all_reduce" else 1
    places = on_nodes(cluster, group)
    rings = [_ring(cluster, group, num_bytes, trips)]
    trees = []
    if 1 < places.inside < group.size and places.is_even:
        rings.append(_hierarchical(cluster, group, num_bytes, trips))
    if places.is_apart and kind in ("all_reduce", "reduce") and not cluster.device.synchronous:
        trees.append(_trees(cluster, group, num_bytes, trips))
    return rings, trees


def _called(cluster: Cluster, took: CollectiveTime) -> CollectiveTime:
    """With what every call takes, whatever its messages."""
    return took._replace(seconds=took.seconds + cluster.device.call_s)


def _measured(
    cluster: Cluster, kind: str, group: RankGroup, num_bytes: float
) -> CollectiveTime | None:
    """What was measured inside a node, where the whole group is in one."""
    if on_nodes(cluster, group).is_apart:
        return None
    calls = cluster.node.calls(kind, group.size)
    if calls is None:
        return None
    scale = 1.0 if kind == "send" else (1 - 1 / group.size) / (1 - 1 / calls.ranks)
    return CollectiveTime(scale * calls.seconds(num_bytes), f"measured {calls.executor}")


def _ring(cluster: Cluster, group: RankGroup, num_bytes: float, trips: int) -> CollectiveTime:
    way = hops(cluster, group)
    slowest = min(way, key=lambda hop: hop.bytes_per_s)
    steps = trips * (group.size - 1)
    moved = steps / group.size * num_bytes
    alphas_s = steps * _mean_alpha_s(cluster, group, way)
    return _bounded(alphas_s, moved / slowest.bytes_per_s, slowest.words, steps)


def _bounded(alphas_s: float, moving_s: float, words: str, messages: int) -> CollectiveTime:
    """Bound by its narrowest link, or by latency where that is more than half."""
    if alphas_s > moving_s:
        words = f"latency of {messages} message{'s' * (messages != 1)} a call"
        return CollectiveTime(alphas_s + moving_s, words, messages)
    return CollectiveTime(alphas_s + moving_s, words)


def _mean_alpha_s(cluster: Cluster, group: RankGroup, way: tuple[RingHop, ...]) -> float:
    """Of the hops of a ring: most stay in a node, one a node leaves it, and one a rack that."""
    nodes = on_nodes(cluster, group)
    racks = on_racks(cluster, group)
    leave_node = 1 / nodes.inside if nodes.is_apart else 0.0
    leave_rack = 1 / racks.inside if nodes.is_apart and racks.is_apart else 0.0
    shares = [1 - leave_node, leave_node - leave_rack, leave_rack]
    shares = shares[0 if nodes.inside > 1 else 1 :][: len(way)]
    return sum(share * hop.alpha_s for share, hop in zip(shares, way, strict=True))


def _trees(cluster: Cluster, group: RankGroup, num_bytes: float, trips: int) -> CollectiveTime:
    """Up, and down, two binary trees over nodes; inside a node the ranks are a chain."""
    inside = on_nodes(cluster, group).inside
    way = hops(cluster, group)
    slowest = min(way, key=lambda hop: hop.bytes_per_s)
    depth = math.ceil(math.log2(group.size / inside))
    alphas_s = depth * way[-1].alpha_s
    if inside > 1:
        alphas_s += (inside - 1) * way[0].alpha_s
    messages = trips * (depth + inside - 1)
    return _bounded(
        trips * alphas_s, trips * num_bytes / slowest.bytes_per_s, slowest.words, messages
    )


def _hierarchical(
    cluster: Cluster, group: RankGroup, num_bytes: float, trips: int
) -> CollectiveTime:
    """Reduce-scatter inside, all-reduce of 1/q between nodes by q rings, all-gather inside."""
    inside = on_nodes(cluster, group).inside
    outer = RankGroup(group.size // inside, group.stride * inside)
    within = _ring(cluster, RankGroup(inside, group.stride), num_bytes, trips)
    between = _ring(cluster, outer, num_bytes / inside, trips)
    longer = max(within, between)
    return CollectiveTime(within.seconds + between.seconds, longer.bound, longer.messages)


def _all_to_all(cluster: Cluster, group: RankGroup, num_bytes: float) -> CollectiveTime:
    """Every rank sends V/p to each other one; what leaves a node or a rack shares its links."""
    places = on_nodes(cluster, group)
    way = hops(cluster, group)
    alpha_s = alphas_at_once(way[-1].alpha_s, group.size - 1)
    part = num_bytes / group.size
    parts = []
    if places.inside > 1:
        parts.append(((places.inside - 1) * part / way[0].bytes_per_s, way[0].words))
    if places.is_apart:
        hop = way[1 if places.inside > 1 else 0]
        sent = places.leaving_pairs / places.leaving  # by each of the flows that a ring would have
        parts.append((sent * part / hop.bytes_per_s, hop.words))
    racks = on_racks(cluster, group)
    if racks.is_apart:
        sent = racks.leaving_pairs / racks.leaving
        parts.append((sent * part / way[-1].bytes_per_s, way[-1].words))
    seconds, bound = max(parts)
    return CollectiveTime(alpha_s + seconds, bound)
