"""A cluster as a picture: spine, racks, nodes and devices, with the rate of every kind of link."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from shoal.cluster.cluster import Cluster
from shoal.cluster.drawing import device_words, heading
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.levels import narrowest, narrowest_cut
from shoal.cluster.topology import coordinates
from shoal.cluster.units import show_rate
from shoal.runtime import svg
from shoal.runtime.wording import counted

MOST_RACKS = 4
MOST_NODES = 4  # in a rack
MOST_DEVICES = 64
_BOX = 34  # a device, with its margin
_MARGIN = 24
_STYLE = """
text{font-size:13px}
.title{font-size:20px;font-weight:700}.small{font-size:11px}.note{fill:#5a6675}
.rack{fill:#f1f4f7;stroke:#9aa5b1}.node{fill:#fff;stroke:#9aa5b1}
.device{fill:#d7e9f7;stroke:#0072b2}.switch{fill:#fff3d6;stroke:#e69f00}
.link{stroke:#5a6675;stroke-width:2;fill:none}.narrow{stroke:#cc4778;stroke-width:4;fill:none}
.narrowtext{fill:#a6265a;font-weight:700}.halo{paint-order:stroke;stroke:#fff;stroke-width:5px}
"""


class _Canvas:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(svg.box((x, y), (width, height), kind, rx=5))

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
        self.parts.append(svg.path(f"M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}", kind))

    def text(self, x: float, y: float, words: str, kind: str = "", middle: bool = False) -> None:
        anchor = "middle" if middle else None
        self.parts.append(svg.text(x, y, words, kind or None, text_anchor=anchor))


@dataclass(frozen=True)
class _Sizes:
    """How much of the cluster is drawn, and how large its parts are, in pixels."""

    racks: int
    nodes: int
    devices: int
    columns: int
    head: float  # room for the switch of a rack

    @property
    def node(self) -> tuple[float, float]:
        rows = -(-self.devices // self.columns)
        return max(220.0, self.columns * _BOX + 16), rows * _BOX + 78

    @property
    def rack(self) -> tuple[float, float]:
        return self.nodes * (self.node[0] + 12) + 12, self.node[1] + self.head + 12


def cluster_svg(cluster: Cluster) -> str:
    sizes = _sizes(cluster)
    canvas = _Canvas()
    width = max(880.0, sizes.racks * (sizes.rack[0] + 20) + 2 * _MARGIN)
    top = 150.0 if cluster.racks > 1 else 70.0
    height = top + sizes.rack[1] + 150
    canvas.text(_MARGIN, 34, heading(cluster), "title")
    spine = (width / 2, 78.0)
    for rack in range(sizes.racks):
        corner = (_MARGIN + rack * (sizes.rack[0] + 20), top)
        _draw_rack(canvas, cluster, sizes, rack, corner)
        if cluster.racks > 1:
            kind = "narrow" if _is_narrow(cluster, "spine") else "link"
            canvas.line(*spine, corner[0] + sizes.rack[0] / 2, top + 12, kind)
    if cluster.racks > 1:
        _draw_spine(canvas, cluster, spine)
    lines = [line for words in _captions(cluster, sizes) for line in wrap(words, int(width / 7.5))]
    for number, words in enumerate(lines):
        canvas.text(_MARGIN, top + sizes.rack[1] + 30 + 20 * number, words, "note")
    return svg.document(heading(cluster), (width, height), _STYLE, canvas.parts, "#fff")


def _sizes(cluster: Cluster) -> _Sizes:
    per_rack = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    devices = min(cluster.node.devices, MOST_DEVICES)
    torus = cluster.node.torus
    columns = torus[-1] if torus is not None and len(torus) == 2 else min(devices, 8)
    racks = min(cluster.racks, MOST_RACKS)
    nodes = min(per_rack, MOST_NODES if racks <= 2 else 2)
    return _Sizes(racks, nodes, devices, min(columns, 16), 100 if cluster.nodes > 1 else 12)


def _is_narrow(cluster: Cluster, name: str) -> bool:
    level = narrowest(cluster)
    return level is not None and level.name == name


def _draw_spine(canvas: _Canvas, cluster: Cluster, spine: tuple[float, float]) -> None:
    x, y = spine
    canvas.box(x - 60, y - 18, 120, 30, "switch")
    canvas.text(x, y + 2, "spine", middle=True)
    nic = cluster.node.nic
    assert nic is not None
    rate = show_rate(cluster.uplink_bytes_per_s / nic.efficiency)
    words = f"uplinks of a rack: {rate}, 1:{cluster.oversubscription:g}"
    canvas.text(x + 76, y + 2, words, "halo narrowtext" if _is_narrow(cluster, "spine") else "halo")


def _draw_rack(
    canvas: _Canvas, cluster: Cluster, sizes: _Sizes, rack: int, corner: tuple[float, float]
) -> None:
    x, y = corner
    width, height = sizes.rack
    canvas.box(x, y, width, height, "rack")
    middle = x + width / 2
    per_rack = cluster.nodes_per_rack or cluster.nodes
    first = rack * per_rack
    shown = min(sizes.nodes, cluster.nodes - first)
    narrow = _is_narrow(cluster, "rack")
    for index in range(shown):
        node_x = x + 12 + index * (sizes.node[0] + 12)
        if cluster.nodes > 1:
            kind = "narrow" if narrow else "link"
            canvas.line(middle, y + 30, node_x + sizes.node[0] / 2, y + sizes.head, kind)
        _draw_node(canvas, cluster, sizes, first + index, (node_x, y + sizes.head))
    if cluster.nodes > 1:
        canvas.box(middle - 90, y + 12, 180, 28, "switch")
        canvas.text(middle, y + 31, f"top-of-rack switch {rack}", middle=True)
        nic = cluster.node.nic
        assert nic is not None
        words = f"{cluster.node.nics} x {nic.name}: {show_rate(nic.bytes_per_s)}"
        kind = "small halo narrowtext" if narrow else "small halo"
        canvas.text(middle, y + 66, words, kind, middle=True)


def _draw_node(
    canvas: _Canvas, cluster: Cluster, sizes: _Sizes, node: int, corner: tuple[float, float]
) -> None:
    x, y = corner
    width, height = sizes.node
    canvas.box(x, y, width, height, "node")
    canvas.text(x + 8, y + 18, f"node {node}")
    kind = "narrowtext small" if _is_narrow(cluster, "node") else "small"
    for number, words in enumerate(_node_links(cluster)):
        canvas.text(x + 8, y + 36 + 15 * number, words, kind if number == 0 else "small")
    for device in range(sizes.devices):
        row, column = divmod(device, sizes.columns)
        left = x + 10 + column * _BOX
        box_y = y + 70 + row * _BOX
        _draw_torus_links(canvas, cluster, sizes, device, (left, box_y))
        canvas.box(left, box_y, _BOX - 8, _BOX - 8, "device")
        rank = node * cluster.node.devices + device
        canvas.text(left + (_BOX - 8) / 2, box_y + 17, str(rank), "small", middle=True)


def _draw_torus_links(
    canvas: _Canvas, cluster: Cluster, sizes: _Sizes, device: int, corner: tuple[float, float]
) -> None:
    """To the next neighbor along each of two axes; the links round the ends are not drawn."""
    torus = cluster.node.torus
    if torus is None or len(torus) != 2 or torus[-1] != sizes.columns:
        return
    row, column = coordinates(torus, device)
    x, y = corner
    if column + 1 < torus[1]:
        canvas.line(x + _BOX - 8, y + 13, x + _BOX, y + 13, "link")
    if row + 1 < torus[0]:
        canvas.line(x + 13, y + _BOX - 8, x + 13, y + _BOX, "link")


def _node_links(cluster: Cluster) -> list[str]:
    node = cluster.node
    links: list[LinkSpec | None] = [node.fabric if node.devices > 1 else None, node.pcie]
    return [f"{link.name}: {show_rate(link.bytes_per_s)}" for link in links if link is not None]


def _captions(cluster: Cluster, sizes: _Sizes) -> list[str]:
    lines = [narrowest_cut(cluster), f"each device: {device_words(cluster.device)}"]
    per_rack = min(cluster.nodes, cluster.nodes_per_rack or cluster.nodes)
    left_out = [
        counted(all_of_them - shown, f"more {word}", f"more {word}s {where}")
        for all_of_them, shown, word, where in (
            (cluster.racks, sizes.racks, "rack", ""),
            (per_rack, sizes.nodes, "node", "in each rack"),
            (cluster.node.devices, sizes.devices, "device", "in each node"),
        )
        if all_of_them > shown
    ]
    if cluster.node.torus is not None:
        lines.append("not drawn: the links of the torus round its ends")
    if left_out:
        lines.append(f"not drawn: {', '.join(left_out)}")
    return lines
