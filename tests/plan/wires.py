"""A small topology for the simulator's tests: a port a rank, racks, and uplinks between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.simulator.messages import PortLink, WireLink


@dataclass(frozen=True)
class OnePort:
    """Ranks around a switch that is never full: the network of the alpha-beta model."""

    ranks: int
    port_bytes_per_s: float
    message_alpha_s: float = 0.0

    @property
    def links(self) -> Sequence[WireLink]:
        out = PortLink("port out", self.port_bytes_per_s, self.message_alpha_s)
        back = PortLink("port in", self.port_bytes_per_s, 0.0)
        return [out] * self.ranks + [back] * self.ranks

    def path(self, src: int, dst: int) -> Sequence[int]:
        return (src, self.ranks + dst)


@dataclass(frozen=True)
class RackWires:
    """Each rank is a node with one port; a rack's uplinks together are narrower than its ports."""

    ranks: int
    per_rack: int
    port_bytes_per_s: float
    oversubscription: float
    message_alpha_s: float = 0.0

    @property
    def racks(self) -> int:
        return -(-self.ranks // self.per_rack)

    @property
    def links(self) -> Sequence[WireLink]:
        rate = self.port_bytes_per_s
        uplink = rate * self.per_rack / self.oversubscription
        ports = [PortLink("port out", rate, self.message_alpha_s)] * self.ranks
        ports += [PortLink("port in", rate, 0.0)] * self.ranks
        up = [PortLink("uplink", uplink, 0.0)] * self.racks
        return [*ports, *up, *([PortLink("downlink", uplink, 0.0)] * self.racks)]

    def path(self, src: int, dst: int) -> Sequence[int]:
        ends = (src, self.ranks + dst)
        one, other = src // self.per_rack, dst // self.per_rack
        if one == other:
            return ends
        first = 2 * self.ranks
        return (*ends, first + one, first + self.racks + other)
