"""The levels of a cluster, from a node to the spine: how much crosses each, and the narrowest.

At each level the devices below it are cut into two halves. The bisection bandwidth is what crosses
that cut in one direction; a device's share is what it can send across while all others do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.topology import bisection_links
from shoal.cluster.units import show_rate


@dataclass(frozen=True)
class Level:
    name: str  # node, rack, spine
    link: str
    line_bytes_per_s: float  # of one link, one direction
    reached_bytes_per_s: float  # of it, by large messages
    links: int  # of this kind below one switch of this level
    bisection_bytes_per_s: float
    devices: int  # on both sides of the cut
    words: str  # where the cut is

    @property
    def device_bytes_per_s(self) -> float:
        return self.bisection_bytes_per_s / max(1, self.devices // 2)

    @property
    def sentence(self) -> str:
        return (
            f"{self.words}: {show_rate(self.bisection_bytes_per_s)} each way between two halves "
            f"of {self.devices} devices, {show_rate(self.device_bytes_per_s)} for each device"
        )


def levels(cluster: Cluster) -> tuple[Level, ...]:
    """From the innermost outwards; none for a single device."""
    found = []
    if cluster.node.devices > 1:
        found.append(_node_level(cluster))
    nodes = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    if nodes > 1 and cluster.node.nic is not None:
        found.append(_rack_level(cluster, cluster.node.nic, nodes))
    if cluster.racks > 1 and cluster.node.nic is not None:
        found.append(_spine_level(cluster, cluster.node.nic))
    return tuple(found)


def narrowest(cluster: Cluster) -> Level | None:
    """The level at which a device's share is smallest; the inner one of two that are equal."""
    return min(levels(cluster), key=lambda level: level.device_bytes_per_s, default=None)


def narrowest_cut(cluster: Cluster) -> str:
    """One sentence."""
    level = narrowest(cluster)
    if level is None:
        return "One device: nothing has to cross a link."
    return f"The narrowest cut is {level.sentence}."


def _node_level(cluster: Cluster) -> Level:
    node = cluster.node
    half = node.devices // 2
    link = node.fabric or node.pcie
    assert link is not None
    if node.fabric is None:
        switches = -(-node.devices // node.devices_per_pcie)
        words, crossing = _pcie_cut(cluster, switches)
        return _level("node", link, switches, crossing, node.devices, words)
    if link.shared:
        words = f"inside a node, whose {node.devices} devices share {link.name}"
        return _level("node", link, 1, link.rate, node.devices, words)
    if node.torus is not None:
        count = bisection_links(node.torus)
        size = " x ".join(map(str, node.torus))
        words = f"across the torus of {size} ({count} links of {link.name})"
        return _level("node", link, count, count * link.rate, node.devices, words)
    crossing = half * link.rate
    if not node.fabric_is_switched:
        crossing *= (node.devices - half) / (node.devices - 1)
    words = f"inside a node ({link.name} of each device)"
    return _level("node", link, node.devices, crossing, node.devices, words)


def _pcie_cut(cluster: Cluster, switches: int) -> tuple[str, float]:
    """Half of the devices against the others: between switches, sockets, or below one switch."""
    node = cluster.node
    pcie = node.pcie
    assert pcie is not None
    if switches == 1:
        crossing = pcie.rate if pcie.shared else node.devices // 2 * pcie.rate
        return f"inside a node ({pcie.name} behind one switch)", crossing
    crossing = switches // 2 * pcie.rate
    if node.sockets > 1 and node.socket_link is not None and node.socket_link.rate < crossing:
        link = node.socket_link
        return f"between the sockets of a node ({link.name})", link.rate
    shared = f", each for {node.devices_per_pcie} devices" if node.devices_per_pcie > 1 else ""
    return f"inside a node ({switches} links of {pcie.name}{shared})", crossing


def _rack_level(cluster: Cluster, nic: LinkSpec, nodes: int) -> Level:
    devices = nodes * cluster.node.devices
    crossing = nodes // 2 * cluster.node_bytes_per_s
    count = f"{cluster.node.nics} x {nic.name}" if cluster.node.nics > 1 else nic.name
    words = f"between nodes ({count} of each node)"
    return _level("rack", nic, nodes * cluster.node.nics, crossing, devices, words)


def _spine_level(cluster: Cluster, nic: LinkSpec) -> Level:
    crossing = cluster.racks // 2 * cluster.uplink_bytes_per_s
    words = f"between racks (uplinks to the spine, oversubscribed 1:{cluster.oversubscription:g})"
    uplink = LinkSpec(
        f"uplinks of a rack, 1:{cluster.oversubscription:g}",
        cluster.uplink_bytes_per_s / nic.efficiency,
        nic.alpha_s + cluster.uplink_alpha_s,
        nic.efficiency,
    )
    # racks that are not full, and an odd one, do not change what half of the racks can send
    per_rack = (cluster.nodes_per_rack or cluster.nodes) * cluster.node.devices
    return _level(
        "spine", uplink, cluster.racks, crossing, cluster.racks // 2 * 2 * per_rack, words
    )


def _level(
    name: str, link: LinkSpec, links: int, crossing: float, devices: int, words: str
) -> Level:
    rate = link.bytes_per_s
    return Level(name, link.name, rate, link.rate, links, crossing, devices, words)
