"""The graph of a cluster: directed links with capacities, and the path between two ranks.

    device - NVSwitch - device                                    inside a node with a fabric
    device - PCIe switch [- socket - socket - PCIe switch] - device           … without one
    device - PCIe - NIC - top-of-rack switch [- spine - top-of-rack switch] - NIC - PCIe - device

Each link is one direction. The alphas along a path add up to the alpha of its outermost link kind,
plus that of the spine. A NIC with `transport = "rdma"` is reached from its PCIe switch, others
through the host. Where a device has several NICs they are one link with their joint rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from shoal.cluster import Cluster


def coordinates(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(int(along) for along in np.unravel_index(rank, sizes))


def rank_at(sizes: tuple[int, ...], place: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(place, sizes, mode="wrap"))


def neighbors(sizes: tuple[int, ...], rank: int) -> list[int]:
    """The ranks one step away along each axis; once each where an axis has two places."""
    place = coordinates(sizes, rank)
    moved = [
        (*place[:axis], place[axis] + step, *place[axis + 1 :])
        for axis, size in enumerate(sizes)
        for step in (1, -1)
        if size > 1
    ]
    return list(dict.fromkeys(rank_at(sizes, one) for one in moved))


def neighbor_steps(sizes: tuple[int, ...], src: int, dst: int) -> list[int]:
    """The ranks on the way, both ends included: one axis after the other, the shorter way round."""
    place = list(coordinates(sizes, src))
    target = coordinates(sizes, dst)
    stops = [src]
    for axis, size in enumerate(sizes):
        ahead = (target[axis] - place[axis]) % size
        step = 1 if ahead <= size - ahead else -1
        while place[axis] != target[axis]:
            place[axis] = (place[axis] + step) % size
            stops.append(rank_at(sizes, tuple(place)))
    return stops


def bisection_links(sizes: tuple[int, ...]) -> int:
    """Links in one direction between two halves, cut across the longest axis."""
    longest = max(sizes)
    columns = math.prod(sizes) // longest
    return columns * (2 if longest > 2 else 1)


@dataclass(frozen=True)
class GraphLink:
    """One direction of a link; `src` and `dst` are vertices such as `gpu 3` or `spine`."""

    name: str
    src: str
    dst: str
    bytes_per_s: float
    alpha_s: float = 0.0


class ClusterTopology:
    """Paths are walks over vertices; between two that no link joins a message loses no time."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.links: list[GraphLink] = []
        self._ids: dict[tuple[str, str], int] = {}
        self._nics = min(cluster.node.nics, cluster.node.devices)
        self._paths: dict[tuple[int, int], tuple[int, ...]] = {}
        for rack in range(cluster.racks):
            if cluster.racks > 1 and cluster.node.nic is not None:
                ends = (_tor(rack), "spine")
                rate = cluster.uplink_bytes_per_s
                self._join(f"uplink of rack {rack}", *ends, rate, cluster.uplink_alpha_s)
        for node in range(cluster.nodes):
            self._add_fabric(node)
            self._add_pcie(node)
            self._add_nics(node)
        self._ways = [self._way(rank) for rank in range(cluster.devices)]

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """The ids of the links from one rank to another, in order; none to itself."""
        key = (src, dst)
        if key not in self._paths:
            pairs = pairwise(self._stops(src, dst))
            self._paths[key] = tuple(self._ids[pair] for pair in pairs if pair in self._ids)
        return self._paths[key]

    def alpha_s(self, src: int, dst: int) -> float:
        return sum(self.links[one].alpha_s for one in self.path(src, dst))

    def bytes_per_s(self, src: int, dst: int) -> float:
        """The rate of one message that has the path for itself."""
        rates = [self.links[one].bytes_per_s for one in self.path(src, dst)]
        return min(rates, default=float("inf"))

    def _add(self, name: str, src: str, dst: str, bytes_per_s: float, alpha_s: float = 0.0) -> None:
        self._ids[src, dst] = len(self.links)
        self.links.append(GraphLink(name, src, dst, bytes_per_s, alpha_s))

    def _join(self, name: str, low: str, high: str, rate: float, alpha_s: float = 0.0) -> None:
        """Both directions; a message pays the alpha on its way up."""
        self._add(name, low, high, rate, alpha_s)
        self._add(name, high, low, rate)

    def _add_nics(self, node: int) -> None:
        nic = self.cluster.node.nic
        if nic is None:
            return
        pcie = self.cluster.node.pcie
        tor = _tor(self.cluster.place(node * self.cluster.node.devices)[0])
        rate = self.cluster.node.nics * nic.rate / self._nics
        alpha_s = max(0.0, nic.alpha_s - (pcie.alpha_s if pcie else 0.0))
        for index in range(self._nics):
            self._join(
                f"{nic.name} of node {node}", _vertex("nic", node, index), tor, rate, alpha_s
            )

    def _add_fabric(self, node: int) -> None:
        spec = self.cluster.node
        fabric = spec.fabric
        if fabric is None or spec.devices == 1:
            return
        if fabric.shared:
            bus = f"node {node}"
            self._add(f"{fabric.name} of {bus}", bus, bus, fabric.rate, fabric.alpha_s)
            return
        # links between neighbors of a torus, or between all pairs, which share a device's rate
        share = 1.0 if spec.torus is not None else 1.0 / (spec.devices - 1)
        for device in range(spec.devices):
            gpu = self._gpu(node, device)
            if spec.torus is None and spec.fabric_is_switched:
                self._join(
                    f"{fabric.name} of {gpu}",
                    gpu,
                    f"switch of node {node}",
                    fabric.rate,
                    fabric.alpha_s,
                )
                continue
            others = [one for one in range(spec.devices) if one != device]
            for other in others if spec.torus is None else neighbors(spec.torus, device):
                peer = self._gpu(node, other)
                name = f"{fabric.name} from {gpu} to {peer}"
                self._add(name, gpu, peer, fabric.rate * share, fabric.alpha_s)

    def _add_pcie(self, node: int) -> None:
        spec = self.cluster.node
        pcie = spec.pcie
        if pcie is None:
            return
        for device in range(spec.devices):
            port = self._port(node, device)
            switch = _vertex("pcie", node, device // spec.devices_per_pcie)
            if (port, switch) not in self._ids:
                self._join(f"{pcie.name} of {port}", port, switch, pcie.rate, pcie.alpha_s)
        if self._has_switches:
            for index in range(-(-spec.devices // spec.devices_per_pcie)):
                switch = _vertex("pcie", node, index)
                self._join(
                    f"{pcie.name} above {switch}", switch, self._socket(node, index), pcie.rate
                )
        if spec.socket_link is not None:
            link = spec.socket_link
            for pair in permutations(range(spec.sockets), 2):
                one, other = (_vertex("socket", node, socket) for socket in pair)
                self._add(f"{link.name} of node {node}", one, other, link.rate, link.alpha_s)

    def _stops(self, src: int, dst: int) -> list[str]:
        rack, node, device = self.cluster.place(src)
        other_rack, other_node, other_device = self.cluster.place(dst)
        if src == dst:
            return []
        if node == other_node:
            return self._inside(node, device, other_device)
        spine = ["spine"] if rack != other_rack else []
        back = self._ways[dst][::-1]
        return [*self._ways[src], *spine, *(back if spine else back[1:])]

    def _inside(self, node: int, device: int, other: int) -> list[str]:
        spec = self.cluster.node
        if spec.fabric is None:
            per = spec.devices_per_pcie
            between = self._between_switches(node, device // per, other // per)
            return [self._port(node, device), *between, self._port(node, other)]
        if spec.fabric.shared:
            return [f"node {node}"] * 2
        if spec.torus is not None:
            return [self._gpu(node, stop) for stop in neighbor_steps(spec.torus, device, other)]
        switch = [f"switch of node {node}"] if spec.fabric_is_switched else []
        return [self._gpu(node, device), *switch, self._gpu(node, other)]

    def _between_switches(self, node: int, one: int, other: int) -> list[str]:
        sockets = [self._socket(node, index) for index in (one, other) if one != other]
        ends = [_vertex("pcie", node, index) for index in (one, other)]
        return list(dict.fromkeys([ends[0], *sockets, ends[1]]))

    def _way(self, rank: int) -> list[str]:
        """From a device to its top-of-rack switch."""
        spec = self.cluster.node
        rack, node, device = self.cluster.place(rank)
        index = device * self._nics // spec.devices
        last = [_vertex("nic", node, index), _tor(rack)]
        if spec.pcie is None or spec.nic is None:
            return last
        switch = device // spec.devices_per_pcie
        port = self._port(node, device)
        if spec.nic.transport != "rdma" and self._has_switches:
            return [port, _vertex("pcie", node, switch), self._socket(node, switch), *last]
        home = -(-index * spec.devices // self._nics) // spec.devices_per_pcie
        return [port, *self._between_switches(node, switch, home), *last]

    @property
    def _has_switches(self) -> bool:
        """Several devices behind one PCIe switch, each with its own link to it."""
        pcie = self.cluster.node.pcie
        return pcie is not None and not pcie.shared and self.cluster.node.devices_per_pcie > 1

    def _socket(self, node: int, switch: int) -> str:
        spec = self.cluster.node
        return _vertex(
            "socket", node, switch * spec.devices_per_pcie * spec.sockets // spec.devices
        )

    def _gpu(self, node: int, device: int) -> str:
        return f"gpu {node * self.cluster.node.devices + device}"

    def _port(self, node: int, device: int) -> str:
        """Where a device enters PCIe: its own link, or the bus that it shares."""
        pcie = self.cluster.node.pcie
        if pcie is not None and pcie.shared:
            return f"{_vertex('pcie', node, device // self.cluster.node.devices_per_pcie)} bus"
        return self._gpu(node, device)


def _tor(rack: int) -> str:
    return f"top-of-rack switch {rack}"


def _vertex(kind: str, node: int, index: int) -> str:
    return f"{kind} {index} of node {node}"
