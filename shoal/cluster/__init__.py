"""Where a model trains: devices, links, nodes, racks, and files that describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.cluster.hardware import Device, LinkSpec, MeasuredCalls


@dataclass(frozen=True)
class Node:
    """One host. `fabric` joins its devices directly; without one they meet over PCIe."""

    devices: int
    fabric: LinkSpec | None = None
    fabric_is_switched: bool = True  # each device has its full rate to any other at once
    pcie: LinkSpec | None = None
    devices_per_pcie: int = 1  # how many devices share one PCIe switch
    sockets: int = 1
    socket_link: LinkSpec | None = None  # QPI or UPI
    nic: LinkSpec | None = None
    nics: int = 1  # shared by the node's devices
    memory_bytes: float | None = None  # of the host, beside its devices
    memory_bytes_per_s: float | None = None  # of the host, where its devices share it
    cores: int | None = None
    torus: tuple[int, ...] | None = None  # the fabric joins neighbors of a torus, as (8, 8)
    # a CPU host: what each of so many workers gets while all of them compute (threads, shared
    # memory, caches, turbo), sorted by the number of workers
    crowded: tuple[tuple[int, Device], ...] = ()
    measured: tuple[MeasuredCalls, ...] = ()  # calls inside the node, in place of closed forms
    mtbf_s: float | None = None  # between two of its failures
    repair_s: float | None = None  # until it, or another one in its place, is back
    price_per_hour: float | None = None
    watts: float | None = None

    @property
    def pcie_bytes_per_s(self) -> float:
        """Of a device, while all that share a switch send; 0: there is no PCIe."""
        return self.pcie.rate / self.devices_per_pcie if self.pcie else 0.0

    def device_among(self, workers: int, alone: Device) -> Device:
        """The device that each of so many workers of a node has; the nearest that is known."""
        if not self.crowded:
            return alone
        return min(self.crowded, key=lambda known: abs(math.log(known[0] / max(1, workers))))[1]

    def calls(self, kind: str, ranks: int) -> MeasuredCalls | None:
        """The measured calls of a kind, with the nearest number of ranks."""
        known = [calls for calls in self.measured if calls.kind == kind]
        return min(known, key=lambda one: abs(math.log(one.ranks / ranks)), default=None)


@dataclass(frozen=True)
class Noise:
    """How unequal workers are: standard deviation of a step, and rare slow workers."""

    jitter: float = 0.0  # standard deviation of a step's compute, as a share of it
    straggler_share: float = 0.0  # of workers, in each step
    straggler_slowdown: float = 1.0
    source: str = "spec"


@dataclass(frozen=True)
class Cluster:
    name: str
    device: Device
    node: Node
    nodes: int = 1
    nodes_per_rack: int | None = None  # None: one rack
    oversubscription: float = 1.0  # ports towards nodes against ports towards the spine
    uplink_alpha_s: float = 0.0  # what the way over the spine adds to a message
    noise: Noise = Noise()
    storage_bytes_per_s: float | None = None  # where checkpoints lie, of all nodes together
    source: str = "spec"
    # what its programs run (`ModelProgram`), where an option does not say it
    program: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def devices(self) -> int:
        return self.nodes * self.node.devices

    @property
    def racks(self) -> int:
        return -(-self.nodes // (self.nodes_per_rack or self.nodes))

    @property
    def node_bytes_per_s(self) -> float:
        """What all NICs of a node carry together, in one direction."""
        return self.node.nics * self.node.nic.rate if self.node.nic else 0.0

    @property
    def uplink_bytes_per_s(self) -> float:
        """What a rack sends to the spine, in one direction."""
        nodes = self.nodes_per_rack or self.nodes
        return nodes * self.node_bytes_per_s / self.oversubscription

    def of_size(self, workers: int) -> Cluster:
        """The same kind of cluster with as many nodes as the workers need.

        A host without a network stays one, and more workers share its devices.
        """
        nodes = -(-workers // self.node.devices)
        if nodes <= self.nodes:
            return self
        if self.node.nic is None and self.nodes == 1:
            return self._crowded(workers)
        return replace(self, nodes=nodes)

    def _crowded(self, workers: int) -> Cluster:
        share = self.node.devices / workers
        device = replace(
            self.device,
            memory_bytes=self.device.memory_bytes * share,
            memory_bytes_per_s=self.device.memory_bytes_per_s * share,
            peak_flops={name: rate * share for name, rate in self.device.peak_flops.items()},
        )
        return replace(self, device=device, node=replace(self.node, devices=workers))

    def device_of(self, workers: int) -> Device:
        """The device that each worker has, where so many run on this cluster."""
        return self.node.device_among(min(workers, self.node.devices), self.device)

    def host_bytes_of(self, workers: int) -> float | None:
        """What each of so many workers has of its host's memory; None: that is not known."""
        known = self.node.memory_bytes
        return None if known is None else known / min(workers, self.node.devices)

    def with_memory(self, num_bytes: float) -> Cluster:
        """The same cluster with devices of so much memory."""
        crowded = tuple(
            (workers, replace(device, memory_bytes=num_bytes))
            for workers, device in self.node.crowded
        )
        device = replace(self.device, memory_bytes=num_bytes)
        return replace(self, device=device, node=replace(self.node, crowded=crowded))

    def place(self, rank: int) -> tuple[int, int, int]:
        """The rack, the node and the device in its node of a rank."""
        node, device = divmod(rank, self.node.devices)
        return node // (self.nodes_per_rack or self.nodes), node, device
