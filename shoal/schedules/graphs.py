"""Graphs as text: an edge list in a file, on one line of a strategy, or from networkx.

    file            one line             meaning
    0 1             edges:0-1            0 and 1 hear each other
    0 1 0.25        edges:0-1:0.25       … and take that share of each other's weights
    0 > 1 0.25      edges:0>1:0.25       1 hears 0, and not the other way round
    1 1 0.5         edges:1-1:0.5        what 1 keeps of its own; else what is left of 1

Files may have comments (#) and commas. A line says both directions, unless the other direction
has a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import StrategyError
from shoal.runtime.files import read_bounded

MAX_FILE_BYTES = 4 << 20
MAX_INLINE = 9_000  # characters: fits into a strategy, with what else it says
INLINE = "edges:"
_WEIGHT = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,3})?"
_EDGE = rf"[0-9]{{1,6}}[->][0-9]{{1,6}}(?::{_WEIGHT})?"
PATTERN = rf"{INLINE}{_EDGE}(,{_EDGE})*"
_LINE = re.compile(rf"([0-9]{{1,6}})\s*(?:[,\s]|(>))\s*([0-9]{{1,6}})(?:\s*[,\s]\s*({_WEIGHT}))?")


class Edge(NamedTuple):
    """`target` hears `source`."""

    source: int
    target: int
    weight: float | None


def read_edges(graph: str) -> list[Edge]:
    """The edges of a graph that is given as text or as the path of a file; each direction once."""
    lines = _inline(graph) if graph.startswith(INLINE) else _file(Path(graph))
    return _both_directions(list(lines), graph if len(graph) < 60 else INLINE + "…")


def _inline(text: str) -> Iterator[tuple[Edge, bool]]:
    for word in text.removeprefix(INLINE).split(","):
        pair, _, weight = word.partition(":")
        one_way = ">" in pair
        source, target = pair.split(">" if one_way else "-")
        yield Edge(int(source), int(target), float(weight) if weight else None), one_way


def _file(path: Path) -> Iterator[tuple[Edge, bool]]:
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise StrategyError(f"the edge list {path} is no text") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if match is not None:
            source, mark, target, weight = match.groups()
            yield Edge(int(source), int(target), float(weight) if weight else None), mark == ">"
        elif line:
            raise StrategyError(
                f"line {number} of {path} is no edge: write two workers and perhaps a weight, "
                "such as 0 1 0.25"
            )


def _both_directions(lines: list[tuple[Edge, bool]], where: str) -> list[Edge]:
    if len({edge.weight is None for edge, _ in lines}) > 1:
        raise StrategyError(f"{where}: some edges have a weight and some have none")
    by_ends: dict[tuple[int, int], Edge] = {}
    for edge, _ in lines:
        if edge[:2] in by_ends:
            raise StrategyError(f"{where}: the edge from {edge[0]} to {edge[1]} is given twice")
        by_ends[edge[:2]] = edge
    for edge, one_way in lines:
        if not one_way:
            back = Edge(edge.target, edge.source, edge.weight)
            by_ends.setdefault(back[:2], back)
    return list(by_ends.values())


def is_networkx(value: object) -> bool:
    """Decided by its attributes, without loading networkx."""
    return all(hasattr(value, name) for name in ("nodes", "edges", "is_directed", "is_multigraph"))


def write_edges(graph: Any) -> str:
    """A networkx graph as text. Nodes that are not 0, 1, … are numbered in their order."""
    if graph.is_multigraph():
        raise StrategyError("gossip takes a graph with one edge between two nodes, no multigraph")
    alone = [node for node in graph if graph.degree(node) == 0]
    if alone:
        raise StrategyError(
            f"node {alone[0]!r} of the graph has no edge: no worker would average with it"
        )
    nodes = list(graph.nodes)
    if set(nodes) == set(range(len(nodes))):
        nodes.sort()
    ranks = {node: rank for rank, node in enumerate(nodes)}
    mark = ">" if graph.is_directed() else "-"
    words = []
    for source, target, weight in graph.edges(data="weight"):
        if weight is not None and not (isinstance(weight, Real) and 0 <= float(weight) <= 1):
            raise StrategyError(f"the weights of a graph are numbers from 0 to 1, not {weight!r}")
        suffix = "" if weight is None else f":{float(weight)!r}"
        words.append(f"{ranks[source]}{mark}{ranks[target]}{suffix}")
    text = INLINE + ",".join(words)
    if len(text) > MAX_INLINE:
        raise StrategyError(
            f"a graph of {graph.number_of_edges()} edges is too long for a strategy: write it to a "
            'file, such as networkx.write_edgelist(graph, "graph.edges", data=False)'
        )
    return text
