"""The graph of a cluster: directed links with capacities, and the path between two ranks.

    device - NVSwitch - device                                    inside a node with a fabric
    device - PCIe switch [- socket - socket - PCIe switch] - device           … without one
    device - PCIe - NIC - top-of-rack switch [- spine - top-of-rack switch] - NIC - PCIe - device

Each link is one direction. The alphas along a path add up to the alpha of its outermost link kind,
plus that of the spine. A NIC with `transport = "rdma"` is reached from its PCIe switch, others
through the host. Where a device has several NICs they are one link with their joint rate.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster.cluster import Cluster
from shoal.errors import BadInput


def coordinates(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        rank, along = divmod(rank, size)
        found.append(along)
    return tuple(reversed(found))


def rank_at(sizes: tuple[int, ...], place: tuple[int, ...]) -> int:
    rank = 0
    for size, along in zip(sizes, place, strict=True):
        rank = rank * size + along % size
    return rank


def neighbors(sizes: tuple[int, ...], rank: int) -> list[int]:
    """The ranks one step away along each axis; once each where an axis has two places."""
    place = coordinates(sizes, rank)
    found = []
    for axis, size in enumerate(sizes):
        for step in (1, -1):
            moved = (*place[:axis], place[axis] + step, *place[axis + 1 :])
            other = rank_at(sizes, moved)
            if size > 1 and other not in found:
                found.append(other)
    return found


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


class _Way(NamedTuple):
    """The links of a device to its NIC, outwards, and back."""

    up: tuple[int, ...]
    down: tuple[int, ...]


class ClusterTopology:
    def __init__(self, cluster: Cluster, join_nics: bool = False):
        """`join_nics`: the NICs of a node are one link of their joint rate, for any device."""
        self.cluster = cluster
        self.links: list[GraphLink] = []
        self._ids: dict[tuple[str, str], int] = {}
        self.nic_bundles = 1 if join_nics else min(cluster.node.nics, cluster.node.devices)
        self._paths: dict[tuple[int, int], tuple[int, ...]] = {}
        for rack in range(cluster.racks):
            self._add_rack(rack)
        for node in range(cluster.nodes):
            self._add_node(node)
        self._ways = [self._way(rank) for rank in range(cluster.devices)]

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """The ids of the links from one rank to another, in order; none to itself."""
        key = (src, dst)
        if key not in self._paths:
            self._paths[key] = self._find_path(src, dst)
        return self._paths[key]

    def alpha_s(self, src: int, dst: int) -> float:
        return sum(self.links[one].alpha_s for one in self.path(src, dst))

    def bytes_per_s(self, src: int, dst: int) -> float:
        """The rate of one message that has the path for itself."""
        rates = [self.links[one].bytes_per_s for one in self.path(src, dst)]
        return min(rates, default=float("inf"))

    def _find_path(self, src: int, dst: int) -> tuple[int, ...]:
        rack, node, device = self.cluster.place(src)
        other_rack, other_node, other_device = self.cluster.place(dst)
        if src == dst:
            return ()
        if node == other_node:
            return self._inside(node, device, other_device)
        if self.cluster.node.nic is None:
            raise BadInput(f"cluster {self.cluster.name} has several nodes, and its node no nic")
        between: tuple[int, ...] = ()
        if rack != other_rack:
            between = (self._id(_tor(rack), "spine"), self._id("spine", _tor(other_rack)))
        return (*self._ways[src].up, *between, *self._ways[dst].down)

    # ---- building

    def _add(self, name: str, src: str, dst: str, bytes_per_s: float, alpha_s: float = 0.0) -> int:
        self.links.append(GraphLink(name, src, dst, bytes_per_s, alpha_s))
        self._ids[src, dst] = len(self.links) - 1
        return len(self.links) - 1

    def _id(self, src: str, dst: str) -> int:
        return self._ids[src, dst]

    def _add_rack(self, rack: int) -> None:
        cluster = self.cluster
        if cluster.racks == 1 or cluster.node.nic is None:
            return
        name = f"uplink of rack {rack}"
        self._add(name, _tor(rack), "spine", cluster.uplink_bytes_per_s, cluster.uplink_alpha_s)
        self._add(name, "spine", _tor(rack), cluster.uplink_bytes_per_s)

    def _add_node(self, node: int) -> None:
        self._add_fabric(node)
        self._add_pcie(node)
        nic = self.cluster.node.nic
        if nic is None:
            return
        pcie = self.cluster.node.pcie
        tor = _tor(self.cluster.place(node * self.cluster.node.devices)[0])
        rate = self.cluster.node.nics * nic.rate / self.nic_bundles
        alpha_s = max(0.0, nic.alpha_s - (pcie.alpha_s if pcie else 0.0))
        for bundle in range(self.nic_bundles):
            name = f"{nic.name} of node {node}"
            self._add(name, _nic(node, bundle), tor, rate, alpha_s)
            self._add(name, tor, _nic(node, bundle), rate)

    def _add_fabric(self, node: int) -> None:
        spec = self.cluster.node
        fabric = spec.fabric
        if fabric is None or spec.devices == 1:
            return
        if fabric.shared:
            bus = f"node {node}"
            self._add(f"{fabric.name} of {bus}", bus, bus, fabric.rate, fabric.alpha_s)
        elif spec.torus is not None or not spec.fabric_is_switched:
            self._add_neighbors(node)
        else:
            for device in range(spec.devices):
                gpu = self._gpu(node, device)
                name = f"{fabric.name} of {gpu}"
                self._add(name, gpu, _switch(node), fabric.rate, fabric.alpha_s)
                self._add(name, _switch(node), gpu, fabric.rate)

    def _add_neighbors(self, node: int) -> None:
        """Links between neighbors of a torus, or between all pairs, which share a device's rate."""
        spec = self.cluster.node
        fabric = spec.fabric
        assert fabric is not None
        share = 1.0 if spec.torus is not None else 1.0 / (spec.devices - 1)
        for device in range(spec.devices):
            gpu = self._gpu(node, device)
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
            source = self._port(node, device)
            switch = _pcie(node, device // spec.devices_per_pcie)
            if (source, switch) not in self._ids:
                self._add(f"{pcie.name} of {source}", source, switch, pcie.rate, pcie.alpha_s)
                self._add(f"{pcie.name} of {source}", switch, source, pcie.rate)
        if self._has_switches:
            for index in range(-(-spec.devices // spec.devices_per_pcie)):
                socket = _socket(node, self._socket_of_switch(index))
                name = f"{pcie.name} above {_pcie(node, index)}"
                self._add(name, _pcie(node, index), socket, pcie.rate)
                self._add(name, socket, _pcie(node, index), pcie.rate)
        if spec.socket_link is not None:
            for one in range(spec.sockets):
                for other in range(spec.sockets):
                    if one != other:
                        ends = (_socket(node, one), _socket(node, other))
                        name = f"{spec.socket_link.name} of node {node}"
                        link = spec.socket_link
                        self._add(name, *ends, link.rate, link.alpha_s)

    # ---- ways

    def _inside(self, node: int, device: int, other: int) -> tuple[int, ...]:
        spec = self.cluster.node
        one = self._gpu(node, device)
        two = self._gpu(node, other)
        if spec.fabric is None:
            return self._over_pcie(node, device, other)
        if spec.fabric.shared:
            return (self._id(f"node {node}", f"node {node}"),)
        if spec.torus is not None:
            stops = neighbor_steps(spec.torus, device, other)
            names = [self._gpu(node, stop) for stop in stops]
            return tuple(self._id(a, b) for a, b in itertools.pairwise(names))
        if not spec.fabric_is_switched:
            return (self._id(one, two),)
        return self._id(one, _switch(node)), self._id(_switch(node), two)

    def _over_pcie(self, node: int, device: int, other: int) -> tuple[int, ...]:
        per = self.cluster.node.devices_per_pcie
        first = self._id(self._port(node, device), _pcie(node, device // per))
        last = self._id(_pcie(node, other // per), self._port(node, other))
        return (first, *self._between_switches(node, device // per, other // per), last)

    def _between_switches(self, node: int, one: int, other: int) -> tuple[int, ...]:
        if one == other:
            return ()
        up: tuple[int, ...] = ()
        down: tuple[int, ...] = ()
        first = _socket(node, self._socket_of_switch(one))
        last = _socket(node, self._socket_of_switch(other))
        if self._has_switches:
            up = (self._id(_pcie(node, one), first),)
            down = (self._id(last, _pcie(node, other)),)
        across = (self._id(first, last),) if (first, last) in self._ids else ()
        return (*up, *across, *down)

    def _way(self, rank: int) -> _Way:
        """From a device to the top-of-rack switch and back."""
        spec = self.cluster.node
        if spec.nic is None:
            return _Way((), ())
        rack, node, device = self.cluster.place(rank)
        bundle = device * self.nic_bundles // spec.devices
        nic = _nic(node, bundle)
        up, down = self._to_nic(node, device, bundle)
        return _Way(
            (*up, self._id(nic, _tor(rack))),
            (self._id(_tor(rack), nic), *down),
        )

    def _to_nic(self, node: int, device: int, bundle: int) -> _Way:
        spec = self.cluster.node
        if spec.pcie is None or spec.nic is None:
            return _Way((), ())
        switch = device // spec.devices_per_pcie
        port = self._port(node, device)
        up = self._id(port, _pcie(node, switch))
        down = self._id(_pcie(node, switch), port)
        if spec.nic.transport != "rdma" and self._has_switches:
            socket = _socket(node, self._socket_of_switch(switch))
            host_up = self._id(_pcie(node, switch), socket)
            return _Way((up, host_up), (self._id(socket, _pcie(node, switch)), down))
        home = -(-bundle * spec.devices // self.nic_bundles) // spec.devices_per_pcie
        if self.nic_bundles == 1 and spec.nics > 1:
            home = switch  # one of the NICs is beside the device
        there = self._between_switches(node, switch, home)
        back = self._between_switches(node, home, switch)
        return _Way((up, *there), (*back, down))

    @property
    def _has_switches(self) -> bool:
        """Several devices behind one PCIe switch, each with its own link to it."""
        pcie = self.cluster.node.pcie
        return pcie is not None and not pcie.shared and self.cluster.node.devices_per_pcie > 1

    def _socket_of_switch(self, switch: int) -> int:
        spec = self.cluster.node
        return switch * spec.devices_per_pcie * spec.sockets // spec.devices

    def _gpu(self, node: int, device: int) -> str:
        return f"gpu {node * self.cluster.node.devices + device}"

    def _port(self, node: int, device: int) -> str:
        """Where a device enters PCIe: its own link, or the bus that it shares."""
        pcie = self.cluster.node.pcie
        if pcie is not None and pcie.shared:
            return f"{_pcie(node, device // self.cluster.node.devices_per_pcie)} bus"
        return self._gpu(node, device)


def _tor(rack: int) -> str:
    return f"top-of-rack switch {rack}"


def _nic(node: int, bundle: int) -> str:
    return f"nic {bundle} of node {node}"


def _switch(node: int) -> str:
    return f"switch of node {node}"


def _pcie(node: int, index: int) -> str:
    return f"pcie {index} of node {node}"


def _socket(node: int, index: int) -> str:
    return f"socket {index} of node {node}"
