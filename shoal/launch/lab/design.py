"""What a lab looks like: hosts in racks, the rates of its links, and the cluster that it is.

    spine ═══ uplink of a rack ═══ top-of-rack switch ─── link ─── host
              hosts x link / oversubscription

Rates are those of lines, as of real Ethernet: preamble, check sequence and gap (24 bytes a frame)
take their part, and so do headers. With frames of 9000 bytes 99.0% of it is payload of TCP, with
frames of 1500 bytes 94.1%.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from shoal.cluster import Cluster, Node
from shoal.cluster.discover import this_machine
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.units import parse_bytes_per_s, show_rate
from shoal.errors import BadInput

MOST_HOSTS = 64
MTU = 9000
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MTUS = (1280, 65535)
_ETHERNET_HEADER = 14  # which the kernel counts
_UNSEEN = 24  # of each frame: preamble, check sequence, gap; the kernel knows nothing of them
_IP_AND_TCP = 20 + 20 + 12  # with timestamps
_LOWEST_BYTES_PER_S = 125e3
_HIGHEST_BYTES_PER_S = 125e9
_ALPHA_S = 50e-6  # typical of TCP between two namespaces
_SPINE_ALPHA_S = 10e-6


@dataclass(frozen=True)
class LabDesign:
    """What `shoal lab up` is asked for."""

    name: str
    hosts: int
    racks: int
    link_bytes_per_s: float
    oversubscription: float = 1.0
    mtu: int = MTU
    workers_per_host: int = 1

    def check(self) -> None:
        """BadInput where it makes no sense."""
        check_name(self.name)
        if self.hosts > MOST_HOSTS:
            raise BadInput(f"--hosts {self.hosts}: a lab has at most {MOST_HOSTS} hosts")
        if self.racks > self.hosts:
            raise BadInput(
                f"--racks {self.racks}: give at least as many --hosts as racks, not {self.hosts}"
            )
        if self.hosts % self.racks:
            raise BadInput(
                f"--racks {self.racks}: {self.hosts} hosts do not fill {self.racks} racks evenly"
            )
        if not math.isfinite(self.oversubscription) or self.oversubscription < 1:
            raise BadInput("--oversubscription: a number of at least 1 is expected, as 4 for 1:4")
        if self.oversubscription > 1 and self.racks == 1:
            raise BadInput(
                "--oversubscription is between racks, and there is one rack: give --racks 2"
            )
        if not _MTUS[0] <= self.mtu <= _MTUS[1]:
            raise BadInput(f"--mtu {self.mtu}: it is between {_MTUS[0]} and {_MTUS[1]}")
        for rate in (self.link_bytes_per_s, self.uplink_bytes_per_s):
            if not _LOWEST_BYTES_PER_S <= rate <= _HIGHEST_BYTES_PER_S:
                limits = f"{show_rate(_LOWEST_BYTES_PER_S)} and {show_rate(_HIGHEST_BYTES_PER_S)}"
                raise BadInput(f"a link of {show_rate(rate)}: a lab has links between {limits}")

    @property
    def hosts_per_rack(self) -> int:
        return self.hosts // self.racks

    @property
    def uplink_bytes_per_s(self) -> float:
        """Of all hosts of a rack together, in one direction."""
        return self.hosts_per_rack * self.link_bytes_per_s / self.oversubscription

    def counted(self, line_bytes_per_s: float) -> float:
        """The part of a line's rate that the kernel counts, in full frames."""
        frame = self.mtu + _ETHERNET_HEADER
        return line_bytes_per_s * frame / (frame + _UNSEEN)

    @property
    def efficiency(self) -> float:
        """The part of a line's rate that is payload of TCP, in full frames."""
        return (self.mtu - _IP_AND_TCP) / (self.mtu + _ETHERNET_HEADER + _UNSEEN)

    def cluster(self) -> Cluster:
        """For the planner: hosts that share the cores of this machine."""
        workers = self.hosts * self.workers_per_host
        machine = this_machine()
        nic = LinkSpec(
            f"lab link (MTU {self.mtu})",
            self.link_bytes_per_s,
            _ALPHA_S,
            self.efficiency,
            transport="tcp",
            assumed=("alpha_us",),
        )
        several = self.workers_per_host > 1
        node = Node(self.workers_per_host, fabric=machine.node.fabric if several else None, nic=nic)
        return Cluster(
            self.name if self.name == "lab" else f"lab {self.name}",
            _share(machine, workers),
            node,
            nodes=self.hosts,
            nodes_per_rack=self.hosts_per_rack if self.racks > 1 else None,
            oversubscription=self.oversubscription,
            uplink_alpha_s=_SPINE_ALPHA_S if self.racks > 1 else 0.0,
        )


def _share(machine: Cluster, workers: int) -> Device:
    """What each of so many workers gets of this machine."""
    if workers <= machine.devices:
        return machine.device_of(workers)
    alone = replace(machine, node=replace(machine.node, nic=None))
    name = f"{machine.device.name}, for {workers / machine.devices:g} workers"
    return replace(alone.of_size(workers).device, name=name)


def check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise BadInput(
            f"{name!r} is not a name for a lab: small letters, digits, - and _, at most 32"
        )


def parse_rate(text: str) -> float:
    """Bytes a second: `1Gb/s` is 125 million."""
    rate = parse_bytes_per_s(text)
    if rate is None:
        raise BadInput(f"--link {text!r} is not a rate: write 1Gb/s or 100MB/s")
    return rate
