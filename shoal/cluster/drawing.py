"""A cluster as a tree in the terminal: each level with its rate in bits and in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from shoal.cluster import Cluster
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.host import Host
from shoal.cluster.topology import bisection_links
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.runtime import svg
from shoal.runtime.tables import plain_table
from shoal.runtime.wording import counted


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


def levels(cluster: Cluster) -> tuple[Level, ...]:
    """From the innermost outwards; none for a single device."""
    found = [_node_level(cluster)] if cluster.node.devices > 1 else []
    nic = cluster.node.nic
    nodes = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    if nodes > 1 and nic is not None:
        count = f"{cluster.node.nics} x {nic.name}" if cluster.node.nics > 1 else nic.name
        words = f"between nodes ({count} of each node)"
        found.append(
            _level(
                "rack",
                nic,
                nodes * cluster.node.nics,
                nodes // 2 * cluster.node_bytes_per_s,
                nodes * cluster.node.devices,
                words,
            )
        )
    if cluster.racks > 1 and nic is not None:
        rate = cluster.uplink_bytes_per_s
        ratio = f"1:{cluster.oversubscription:g}"
        # racks that are not full, and an odd one, do not change what half of the racks can send
        half = cluster.racks // 2
        devices = 2 * half * (cluster.nodes_per_rack or cluster.nodes) * cluster.node.devices
        words = f"between racks (uplinks to the spine, oversubscribed {ratio})"
        found.append(
            Level(
                "spine",
                f"uplinks of a rack, {ratio}",
                rate / nic.efficiency,
                rate,
                cluster.racks,
                half * rate,
                devices,
                words,
            )
        )
    return tuple(found)


def narrowest(cluster: Cluster) -> Level | None:
    """The level at which a device's share is smallest; the inner one of two that are equal."""
    return min(levels(cluster), key=lambda level: level.device_bytes_per_s, default=None)


def narrowest_cut(cluster: Cluster) -> str:
    """One sentence."""
    level = narrowest(cluster)
    if level is None:
        return "One device: nothing has to cross a link."
    return (
        f"The narrowest cut is {level.words}: {show_rate(level.bisection_bytes_per_s)} each way "
        f"between two halves of {level.devices} devices, {show_rate(level.device_bytes_per_s)} for "
        "each device."
    )


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


def _level(
    name: str, link: LinkSpec, links: int, crossing: float, devices: int, words: str
) -> Level:
    rate = link.bytes_per_s
    return Level(name, link.name, rate, link.rate, links, crossing, devices, words)


def draw_cluster(cluster: Cluster, console: Console) -> None:
    console.print(Text(heading(cluster), style="bold"), soft_wrap=True)
    console.print(tree(cluster))
    table = level_table(cluster)
    if table.row_count:
        console.print()
        console.print(table)
    console.print()
    for line in (narrowest_cut(cluster), *notes(cluster)):
        console.print(line)


def heading(cluster: Cluster) -> str:
    racks = f" in {counted(cluster.racks, 'rack')}" if cluster.racks > 1 else ""
    devices = counted(cluster.devices, "device")
    return f"{cluster.name}: {devices}, {counted(cluster.nodes, 'node')}{racks} ({cluster.source})"


def tree(cluster: Cluster) -> Tree:
    inner = _node_tree(cluster)
    if cluster.nodes == 1:
        return inner
    rack = Tree(_numbered("top-of-rack switch of rack", cluster.racks))
    rack.add(_nic_line(cluster)).add(inner)
    if cluster.racks == 1:
        return rack
    spine = Tree("spine")
    assert cluster.node.nic is not None  # of several nodes
    uplinks = show_rate(cluster.uplink_bytes_per_s / cluster.node.nic.efficiency)
    ratio = f"oversubscribed 1:{cluster.oversubscription:g}"
    spine.add(f"uplinks of a rack: {uplinks}, {ratio}").add(rack)
    return spine


def _nic_line(cluster: Cluster) -> str:
    nic = cluster.node.nic
    assert nic is not None
    count = cluster.node.nics
    if count == 1:
        return f"{link_words(nic, 'a node')}, {nic.transport}"
    together = show_rate(count * nic.bytes_per_s)
    return f"{count} x {link_words(nic, 'each')}, {nic.transport}; together {together} a node"


def _node_tree(cluster: Cluster) -> Tree:
    node = cluster.node
    per_rack = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    where = f"; {per_rack} in a rack" if cluster.racks > 1 else ""
    cores = f", {counted(node.cores, 'core')}" if node.cores else ""
    branch = Tree(_numbered("node", cluster.nodes) + cores + where)
    size = show_bytes(node.memory_bytes) if node.memory_bytes else ""
    rate = show_rate(node.memory_bytes_per_s) if node.memory_bytes_per_s else ""
    if size or rate:
        branch.add(f"host memory: {', '.join(filter(None, (size, rate)))}")
    if node.sockets > 1 and node.socket_link:
        branch.add(f"{node.sockets} sockets, {link_words(node.socket_link)}")
    if node.fabric is not None and node.devices > 1:
        shape = "switch" if node.fabric_is_switched else "all pairs"
        per = "a device"
        if node.torus is not None:
            shape = f"torus of {' x '.join(map(str, node.torus))}"
            per = "to a neighbor"
        if node.fabric.shared:
            share = counted(node.devices, "device")
            branch.add(f"{link_words(node.fabric)}, shared by {share}")
        else:
            branch.add(f"{shape}, {link_words(node.fabric, per)}")
    if node.pcie is not None:
        line = link_words(node.pcie, "a device")
        if node.devices_per_pcie > 1:
            switches = -(-node.devices // node.devices_per_pcie)
            what = counted(switches, "PCIe switch", "PCIe switches")
            share = counted(node.devices_per_pcie, "device")
            line = f"{what}, {link_words(node.pcie)}, shared by {share}"
        branch.add(line)
    if node.nic is not None and cluster.nodes == 1:
        branch.add(_nic_line(cluster))
    branch.add(f"{node.devices} x {device_words(cluster.device)}")
    return branch


def level_table(cluster: Cluster) -> Table:
    heads = ["level", "link", "line rate", "large\nmessages", "bisection", "for each\ndevice"]
    rows = [
        [
            level.name,
            level.link,
            show_rate(level.line_bytes_per_s),
            f"{show_bytes(level.reached_bytes_per_s)}/s",
            f"{show_bytes(level.bisection_bytes_per_s)}/s",
            f"{show_bytes(level.device_bytes_per_s)}/s",
        ]
        for level in levels(cluster)
    ]
    return plain_table("", heads, rows, left=2)


def notes(cluster: Cluster) -> list[str]:
    noise = cluster.noise
    found = []
    if noise.jitter:
        said = f" ({noise.source})" if noise.source != "spec" else ""
        found.append(f"Noise: the compute of a step varies by {noise.jitter:.1%}{said}.")
    if noise.straggler_share:
        share = f"{noise.straggler_share:.1%} of the workers of a step"
        found.append(f"Stragglers: {share} are {noise.straggler_slowdown:g} times slower.")
    node = cluster.node
    links = [one for one in (node.fabric, node.pcie, node.socket_link, node.nic) if one]
    wires = () if cluster.device.synchronous else filter(None, (node.fabric, node.pcie))
    if both := ", ".join(f"{one.name} {show_bytes(2 * one.bytes_per_s)}/s" for one in wires):
        found.append(f"Rates are of one direction; both directions together: {both}.")
    parts: list[Device | LinkSpec] = [cluster.device, *dict.fromkeys(links)]
    assumed = [
        f"{'all' if part.source == 'assumed' else ', '.join(part.assumed)} of {part.name}"
        for part in parts
        if part.source == "assumed" or part.assumed
    ]
    if assumed:
        found.append(f"Assumed, not read or measured: {'; '.join(assumed)}.")
    return found


def host_lines(host: Host) -> list[str]:
    """What was read about a host."""
    places = f"{counted(host.sockets, 'socket')}, {counted(host.numa_nodes, 'NUMA node')}"
    lines = [
        f"cores    {host.cores} ({host.cpu}; {places})",
        f"memory   {show_bytes(host.memory_bytes)}",
    ]
    for nic in host.nics:
        rate = "speed not reported" if nic.bytes_per_s is None else show_rate(nic.bytes_per_s)
        lines.append(f"network  {nic.name}: {nic.kind}, {rate}")
    for number, gpu in enumerate(host.gpus):
        links = ""
        if host.topology.gpus:
            links = f"; to the others {' '.join(host.topology.gpus[number])}"
        lines.append(f"GPU {number}    {gpu.name}, {show_bytes(gpu.memory_bytes)}{links}")
    return lines if host.gpus else [*lines, "GPUs     none (nvidia-smi finds none)"]


def device_words(device: Device) -> str:
    rates = ", ".join(f"{dtype} {show_flops(rate)}" for dtype, rate in device.peak_flops.items())
    memory = f"{show_bytes(device.memory_bytes)} at {show_bytes(device.memory_bytes_per_s)}/s"
    return f"{device.name}: {memory}; {rates}"


def show_flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.4g} GFLOP/s"


def link_words(link: LinkSpec, per: str = "") -> str:
    rate = f"{show_rate(link.bytes_per_s)} {per}".rstrip()
    return f"{link.name}: {rate}, alpha {show_seconds(link.alpha_s)}"


def _numbered(one: str, count: int) -> str:
    """`node 0`, `node 0 … 7`, `top-of-rack switch of rack 0 … 3`."""
    return f"{one} 0" + (f" … {count - 1}" if count > 1 else "")


MOST_RACKS = 4
MOST_NODES = 4  # in a rack
MOST_DEVICES = 64
_MARGIN = 24.0
_PAD = 8.0
_LINE = 17.0
_LETTER = 7.4  # pixels, about
_STYLE = """
text{font-size:12px}.title{font-size:20px;font-weight:700}.note{fill:#5a6675;font-size:13px}
.spine{fill:#fff8e6;stroke:#e69f00}.rack{fill:#f1f4f7;stroke:#9aa5b1}
.node{fill:#fff;stroke:#9aa5b1}.device{fill:#d7e9f7;stroke:#0072b2}
.narrow{fill:#a6265a;font-weight:700}
"""


@dataclass(frozen=True)
class _Box:
    """What a level says, above the equal boxes inside of it."""

    kind: str
    lines: tuple[str, ...]
    inside: tuple[_Box, ...] = ()
    columns: int = 1

    @cached_property
    def size(self) -> tuple[float, float]:
        width = max(len(line) for line in self.lines) * _LETTER
        height = len(self.lines) * _LINE
        if self.inside:
            wide, high = self.inside[0].size
            columns = min(self.columns, len(self.inside))
            width = max(width, columns * (wide + _PAD) - _PAD)
            height += -(-len(self.inside) // columns) * (high + _PAD)
        return width + 2 * _PAD, height + 1.5 * _PAD

    def draw(self, x: float, y: float, narrow: str | None) -> str:
        """`narrow` is the kind of the narrowest level, whose words are marked."""
        kind = "narrow" if self.kind == narrow else None
        parts = [svg.box((x, y), self.size, self.kind, rx=5)]
        for number, words in enumerate(self.lines, 1):
            parts.append(svg.text(x + _PAD, y + number * _LINE, words, kind))
        top = y + len(self.lines) * _LINE + _PAD
        for number, box in enumerate(self.inside):
            row, column = divmod(number, self.columns)
            left = x + _PAD + column * (box.size[0] + _PAD)
            parts.append(box.draw(left, top + row * (box.size[1] + _PAD), narrow))
        return "".join(parts)


def cluster_svg(cluster: Cluster) -> str:
    """Boxes of racks around nodes around devices, with the rates of links."""
    racks = min(cluster.racks, MOST_RACKS)
    whole = _rack(cluster, 0)
    if racks > 1:
        assert cluster.node.nic is not None
        rate = show_rate(cluster.uplink_bytes_per_s / cluster.node.nic.efficiency)
        words = f"spine; uplinks of a rack: {rate}, 1:{cluster.oversubscription:g}"
        inside = tuple(_rack(cluster, rack) for rack in range(racks))
        whole = _Box("spine", (words,), inside, MOST_RACKS)
    level = narrowest(cluster)
    width = max(880.0, whole.size[0] + 2 * _MARGIN)
    body = [svg.text(_MARGIN, 34, heading(cluster), "title")]
    body.append(whole.draw(_MARGIN, 60, level.name if level else None))
    lines = [line for words in _captions(cluster) for line in wrap(words, int(width / 7.5))]
    top = 90 + whole.size[1]
    body += [svg.text(_MARGIN, top + 20 * n, words, "note") for n, words in enumerate(lines)]
    return svg.document(heading(cluster), (width, top + 20 * len(lines)), _STYLE, body, "#fff")


def _rack(cluster: Cluster, rack: int) -> _Box:
    per_rack = cluster.nodes_per_rack or cluster.nodes
    shown = min(_shown_nodes(cluster), cluster.nodes - rack * per_rack)
    nodes = tuple(_node(cluster, rack * per_rack + index) for index in range(shown))
    nic = cluster.node.nic
    if cluster.nodes == 1 or nic is None:
        return nodes[0]
    words = f"{cluster.node.nics} x {nic.name}: {show_rate(nic.bytes_per_s)}"
    return _Box("rack", (f"top-of-rack switch {rack}", words), nodes, MOST_NODES)


def _shown_nodes(cluster: Cluster) -> int:
    per_rack = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    return min(per_rack, MOST_NODES if cluster.racks <= 2 else 2)


def _node(cluster: Cluster, node: int) -> _Box:
    spec = cluster.node
    links = [spec.fabric if spec.devices > 1 else None, spec.pcie]
    words = [f"{link.name}: {show_rate(link.bytes_per_s)}" for link in links if link is not None]
    ranks = range(node * spec.devices, node * spec.devices + min(spec.devices, MOST_DEVICES))
    devices = tuple(_Box("device", (str(rank).center(4),)) for rank in ranks)
    columns = spec.torus[-1] if spec.torus is not None else 8
    return _Box("node", (f"node {node}", *words), devices, min(columns, 16))


def _captions(cluster: Cluster) -> list[str]:
    lines = [narrowest_cut(cluster), f"each device: {device_words(cluster.device)}"]
    per_rack = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    left_out = [
        counted(all_of_them - shown, f"more {word}", f"more {word}s {where}")
        for all_of_them, shown, word, where in (
            (cluster.racks, MOST_RACKS, "rack", ""),
            (per_rack, _shown_nodes(cluster), "node", "in each rack"),
            (cluster.node.devices, MOST_DEVICES, "device", "in each node"),
        )
        if all_of_them > shown
    ]
    return [*lines, f"not drawn: {', '.join(left_out)}"] if left_out else lines
