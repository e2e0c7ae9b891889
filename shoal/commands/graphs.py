"""`shoal graphs`: the graphs of gossip side by side, and how fast replicas agree over each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes, show_bytes
from shoal.commands import options
from shoal.commands.options import option
from shoal.commands.output import plain_table, show, write_text
from shoal.errors import BadInput, StrategyError
from shoal.runtime import svg as drawing
from shoal.schedules.mixing import Mixing, mixing_for
from shoal.strategy.options import GRAPHS

MOST_IN_PICTURE = 64
_WIDE = 230  # pixels of a graph in the picture
_HIGH = 258
_COLUMNS = 4
_RADIUS = 82
_SAYS = "\nComputed from the mixing matrix; a run prints the distance between its replicas."
_STYLE = """.edge{stroke:#7b8794;stroke-width:1.2;fill:none}.node{fill:#0072b2}
.later{stroke:#c3cbd4;stroke-dasharray:4 3;fill:none}"""


def graphs(
    workers: int = option("Number of replicas.", 16, "--workers", "-n", min=2),
    graph: list[str] | None = option(
        "A graph of gossip, or an edge list; repeatable.", show_default="all"
    ),
    size: str = option("Of the parameters: 100MB.", "100MB", "--bytes"),
    svg: Path | None = option("Draw the graphs here."),
    as_json: options.Json = False,
) -> None:
    """Compare the graphs over which replicas average (gossip): bytes against agreement.

    The second eigenvalue of the mixing matrix is the factor by which the distance between
    replicas shrinks in a step without training.
    """
    num_bytes = parse_bytes(size)
    if svg is not None and workers > MOST_IN_PICTURE:
        raise BadInput(f"a picture has at most {MOST_IN_PICTURE} workers, not {workers}")
    found: dict[str, Mixing] = {}
    left_out: list[str] = []
    for name in graph or GRAPHS:
        try:
            found[name] = mixing_for(name, workers)
        except StrategyError as error:
            if graph or workers > 512:
                raise
            left_out.append(f"{name} is left out: {error}")
    rows = sorted(
        (_document(name, mixing, num_bytes) for name, mixing in found.items()),
        key=lambda one: one["steps_to_tenth"] * one["sent_bytes_total"],
    )
    if svg is not None:
        write_text(svg, picture({one["graph"]: found[one["graph"]] for one in rows}, workers))
    document = {"workers": workers, "bytes": num_bytes, "graphs": rows, "left_out": left_out}
    show(document, [_table(rows, workers, num_bytes), *left_out, _SAYS], as_json, wraps=True)


def _document(name: str, mixing: Mixing, num_bytes: int) -> dict[str, Any]:
    steps = range(len(mixing.matrices))
    ranks = range(mixing.workers)
    heard = [sum(len(mixing.listeners(rank, n)) for n in steps) / len(steps) for rank in ranks]
    return {
        "graph": name,
        "degrees": mixing.degrees,
        "sent_bytes_largest": max(heard) * num_bytes,
        "sent_bytes_total": sum(heard) * num_bytes,
        "second_eigenvalue": mixing.second_eigenvalue,
        "steps_to_tenth": mixing.steps_to_tenth,
    }


def _table(rows: list[dict[str, Any]], workers: int, num_bytes: int) -> Table:
    heads = ["graph", "degree", "sent/\nworker", "sent\na step", "second\neigenvalue"]
    cells = []
    for one in rows:
        total, steps, eigenvalue = (
            one[key] for key in ("sent_bytes_total", "steps_to_tenth", "second_eigenvalue")
        )
        degree = "-".join(map(str, sorted(set(one["degrees"]))))
        sent = map(show_bytes, (one["sent_bytes_largest"], total))
        mark = "" if eigenvalue else "*"
        row = [one["graph"][:24], degree, *sent, f"{eigenvalue:.4f}", f"{steps}{mark}"]
        cells.append([*row, show_bytes(steps * total)])
    title = f"gossip of {show_bytes(num_bytes)} of parameters between {workers} workers"
    title += "\nleast bytes to a tenth first; * equal after so many steps"
    return plain_table(title, [*heads, "steps to\na tenth", "bytes to\na tenth"], cells, left=1)


def picture(found: dict[str, Mixing], workers: int) -> str:
    """Every graph as a circle of workers, a star around its centre."""
    title = f"Graphs of gossip over {workers} workers"
    body = [drawing.TIP, drawing.text(24, 34, title, "title")]
    for number, (name, mixing) in enumerate(found.items()):
        row, column = divmod(number, _COLUMNS)
        left = 24 + column * _WIDE
        top = 56 + row * _HIGH
        body.append(drawing.text(left, top + 14, name[:28], "name"))
        notes = f"λ₂ = {mixing.second_eigenvalue:.3f}, {mixing.steps_to_tenth} steps to a tenth"
        body.append(drawing.text(left, top + 31, notes, "note"))
        places = _places(mixing, left + _WIDE / 2 - 14, top + 44 + _RADIUS + 8)
        body += [
            line for turn in range(len(mixing.matrices)) for line in _edges(mixing, turn, places)
        ]
        dot = 5.0 if workers <= 24 else 3.0
        body += [drawing.element("circle", class_="node", cx=x, cy=y, r=dot) for x, y in places]
    rows = math.ceil(len(found) / _COLUMNS)
    columns = min(len(found), _COLUMNS)
    size = (max(420, 24 + columns * _WIDE), 64 + rows * _HIGH)
    return drawing.document(title, size, drawing.WORDS + _STYLE, body, "#fff")


def _places(mixing: Mixing, x: float, y: float) -> list[tuple[float, float]]:
    few, most = mixing.degrees
    is_star = most == mixing.workers - 1 > few
    around = mixing.workers - is_star
    angles = [2 * math.pi * rank / around - math.pi / 2 for rank in range(around)]
    circle = [(x + _RADIUS * math.cos(a), y + _RADIUS * math.sin(a)) for a in angles]
    return [(x, y), *circle] if is_star else circle


def _edges(mixing: Mixing, turn: int, places: list[tuple[float, float]]) -> list[str]:
    """Arrows where only one of two hears the other; later steps of a period are dashed."""
    lines = []
    for rank in range(mixing.workers):
        for peer in mixing.listeners(rank, turn):
            is_both = rank in mixing.listeners(peer, turn)
            if is_both and rank > peer:
                continue
            (ax, ay), (bx, by) = places[rank], places[peer]
            short = 1 - 7 / max(8.0, math.hypot(bx - ax, by - ay))
            end = (bx, by) if is_both else (ax + (bx - ax) * short, ay + (by - ay) * short)
            tip = None if is_both or turn else "url(#tip)"
            d = f"M{ax:.1f} {ay:.1f}L{end[0]:.1f} {end[1]:.1f}"
            lines.append(drawing.path(d, "later" if turn else "edge", marker_end=tip))
    return lines
