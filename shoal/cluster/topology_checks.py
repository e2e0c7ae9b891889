"""Whether the parts of a cluster fit together: what is wrong, as a key and a sentence."""

from __future__ import annotations

import math

from shoal.cluster.cluster import Node
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.units import show_rate

Problem = tuple[str, str]  # the key, and what is wrong with it


def check_node(node: Node) -> Problem | None:
    if node.devices > 1 and node.fabric is None and node.pcie is None:
        return "fabric", f"{node.devices} devices need a fabric or a pcie to meet"
    if node.torus is not None:
        if node.fabric is None:
            return "torus", "a torus needs a fabric, the link between neighbors"
        if math.prod(node.torus) != node.devices:
            size = " x ".join(map(str, node.torus))
            return "torus", f"a torus of {size} does not have the {node.devices} devices"
    if node.sockets > 1 and node.socket_link is None:
        return "socket_link", f"{node.sockets} sockets need a link between them, such as QPI"
    if node.devices_per_pcie > node.devices:
        return "devices_per_pcie", (
            f"{node.devices_per_pcie} devices cannot share a switch in a node of {node.devices}"
        )
    return None


def oversubscription_of_ports(
    node: Node,
    nodes: int,
    uplinks: int | None,
    uplink: LinkSpec | None,
    ports: int | None,
    stated: float | None,
) -> tuple[float, Problem | None]:
    """Rate towards the nodes of a rack against rate towards the spine; at least 1."""
    link = uplink or node.nic
    if uplinks is None or link is None or node.nic is None:
        ratio = stated or 1.0
    else:
        down = nodes * node.nics * node.nic.bytes_per_s
        up = uplinks * link.bytes_per_s
        ratio = down / up
        if stated is not None and not math.isclose(max(ratio, 1.0), stated, rel_tol=0.01):
            return stated, (
                "oversubscription",
                f"1:{stated:g} is not what the ports say: {nodes} nodes with "
                f"{show_rate(down)} over {uplinks} uplinks with {show_rate(up)} are 1:{ratio:.3g}",
            )
    problem = _too_many_ports(node, nodes, uplinks, ports, max(ratio, 1.0))
    return max(ratio, 1.0), problem


def _too_many_ports(
    node: Node, nodes: int, uplinks: int | None, ports: int | None, ratio: float
) -> Problem | None:
    if ports is None:
        return None
    down = nodes * node.nics
    up = uplinks if uplinks is not None else math.ceil(down / ratio)
    if down + up <= ports:
        return None
    return "ports", (
        f"{nodes} nodes take {down} ports and the uplinks {up}, and the switch has {ports}"
    )
