"""A cluster as a picture: boxes of racks around nodes around devices, with the rates of links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap

from shoal.cluster import Cluster
from shoal.cluster.drawing import device_words, heading, narrowest, narrowest_cut
from shoal.cluster.units import show_rate
from shoal.runtime import svg
from shoal.runtime.wording import counted

MOST_RACKS = 4
MOST_NODES = 4  # in a rack
MOST_DEVICES = 64
_MARGIN = 24.0
_PAD = 8.0
_LINE = 17.0
_LETTER = 6.6  # pixels, about
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
