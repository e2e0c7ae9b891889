"""A schedule in the terminal, round by round, and as an animated SVG for a browser alone.

Every rank is a box with its chunks. A chunk has a lamp for every rank, which is lit where that
rank's contribution is in it. In a round copies of chunks travel along arrows and light lamps
where they arrive. The animation runs in a loop; a viewer without SMIL shows the start.

    | start | round 1: wait, move, settle | round 2 … | end |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.errors import BadInput
from shoal.runtime import svg
from shoal.runtime.chart import HUES
from shoal.runtime.wording import counted
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.proof import State, initial, prove, states
from shoal.schedules.collectives.transfer_table import Transfer

_STARTS = {
    "broadcast": "The root has the vector; the others wait for it.",
    "scatter": "The root has all pieces; each rank is to get its own.",
    "gather": "Every rank has its own piece; the root is to get all.",
    "all_gather": "Every rank has its own piece; all are to get all pieces.",
    "all_to_all": "Every rank has one piece for every rank.",
    "barrier": "Every rank knows only that it has come itself.",
}
_ENDS = {
    "broadcast": "Done: all ranks have the vector.",
    "reduce": "Done: the root has the sum of all.",
    "scatter": "Done: every rank has its piece.",
    "gather": "Done: the root has all pieces.",
    "all_gather": "Done: all ranks have all pieces.",
    "reduce_scatter": "Done: every rank has one piece of the sum of all.",
    "all_to_all": "Done: every rank has the pieces that were meant for it.",
    "scan": "Done: every rank has the sum of all ranks up to itself.",
    "exclusive_scan": "Done: every rank has the sum of all ranks before it.",
    "barrier": "Done: all ranks know that all have come.",
}


@dataclass(frozen=True)
class Frame:
    """One round: its transfers, one sentence about them, and the state before and after.

    The terminal drawing and the animated picture are both made of these.
    """

    title: str
    text: str
    transfers: tuple[Transfer, ...]
    before: State
    after: State


def frames_of(collective: Collective) -> list[Frame]:
    """The frames of a schedule; a wrong schedule raises `ProofFailed`."""
    state = initial(collective)
    frames = []
    running = states(collective, state)
    for number, transfers in enumerate(collective.rounds, 1):
        before = [dict(slots) for slots in state]
        next(running)
        after = [dict(slots) for slots in state]
        frames.append(
            Frame(
                f"Round {number} of {len(collective.table)}",
                _sentence(collective, transfers),
                tuple(transfers),
                before,
                after,
            )
        )
    return frames


def opening(collective: Collective) -> str:
    vectors = f"Every rank has a vector of its own, in {counted(collective.chunks, 'chunk')}."
    return _STARTS.get(collective.kind, vectors)


def ending(collective: Collective) -> str:
    return _ENDS.get(collective.kind, "Done: all ranks have the sum of all.")


def slot_label(collective: Collective, slot: int) -> str:
    """`c2` is chunk 2, `0→3` the piece from rank 0 to rank 3, `s0` a scratch slot."""
    if slot >= collective.chunks:
        return f"s{slot - collective.chunks}"
    if collective.kind == "all_to_all" and collective.chunks_per_unit == 1:
        return f"{slot // collective.ranks}→{slot % collective.ranks}"
    return f"c{slot}"


def _sentence(collective: Collective, transfers: Sequence[Transfer]) -> str:
    moves = [t for t in transfers if t.src != t.dst]
    if not moves:
        return "Every rank works on what it has; nothing is sent."
    chunks = Counter(t.src for t in moves)
    most = max(chunks.values())
    amount = "1 chunk" if most == 1 else f"up to {most} chunks"
    receivers = len({t.dst for t in moves})
    if len(chunks) == 1:
        to = f"rank {moves[0].dst}" if receivers == 1 else f"{receivers} ranks"
        who = f"Rank {moves[0].src} sends {amount} to {to}"
    elif len(chunks) == collective.ranks:
        who = f"Every rank sends {amount}"
    else:
        who = f"{len(chunks)} ranks send {amount} each"
    adds = {t.reduce for t in moves}
    how = "adds it (solid arrow) or keeps it (dashed)"
    if len(adds) == 1:
        how = "adds it to its own data" if True in adds else "keeps it"
    return f"{who}; who receives it {how}."


MOST_SHOWN = 32
_WIDEST = 16  # slots that still fit side by side


def draw(collective: Collective, console: Console) -> None:
    """Print every round: its messages, then a grid of ranks and chunks.

    A cell lists the ranks whose contributions are in it; what has just changed is highlighted.

        round 1   0 -c3+-> 1   1 -c0+-> 2   …        (+ adds, without it replaces)
                  c0   c1   c2   c3
        rank 0    0    0    02   0
    """
    if collective.ranks > MOST_SHOWN:
        raise BadInput(
            f"a drawing of {collective.ranks} ranks is unreadable: ask for {MOST_SHOWN} or fewer"
        )
    console.print(Text(str(collective), style="bold"), highlight=False)
    console.print(opening(collective), highlight=False)
    console.print(_grid(collective, initial(collective), None))
    for frame in frames_of(collective):
        by_pair: dict[tuple[int, int], list[str]] = {}
        for t in frame.transfers:
            label = slot_label(collective, t.chunk)
            label += "" if t.into is None else f"→{slot_label(collective, t.into)}"
            by_pair.setdefault((t.src, t.dst), []).append(label + "+" * t.reduce)
        arrows = [f"{src}~─{','.join(what)}→~{dst}" for (src, dst), what in by_pair.items()]
        lines = fill("   ".join(arrows), console.width, break_long_words=False).replace("~", " ")
        console.print(
            Text.assemble("\n", (frame.title, "bold"), "  ", frame.text),
            Text(lines, style="cyan"),
            _grid(collective, frame.after, frame.before),
            highlight=False,
            sep="\n",
        )
    prove(collective)  # before the drawing says that it is done
    console.print(Text(ending(collective), style="bold green"), highlight=False)


def _grid(collective: Collective, state: State, before: State | None) -> Grid:
    """A column for each slot; for many of them a line of what each rank holds."""
    labels = [slot_label(collective, slot) for slot in range(collective.slots)]
    is_wide = len(labels) > _WIDEST
    grid = Grid(box=None, padding=(0, 2, 0, 0), show_header=not is_wide)
    grid.add_column("")
    for label in [] if is_wide else labels:
        grid.add_column(label, style="dim", header_style="dim")
    for rank, held in enumerate(state):
        old = held if before is None else before[rank]
        if not is_wide:
            cells = [_cell(collective, held.get(s), old.get(s)) for s in range(len(labels))]
            grid.add_row(f"rank {rank}", *cells)
            continue
        line = Text()
        for slot in sorted(held)[:_WIDEST]:
            value = _cell(collective, held[slot], old.get(slot))
            line.append(f"{labels[slot]}:", "dim").append_text(value).append(" ")
        if len(held) > _WIDEST:
            line.append(f"… {len(held) - _WIDEST} more", "dim")
        grid.add_row(f"rank {rank}", line)
    return grid


def _cell(collective: Collective, bits: int | None, old: int | None) -> Text:
    """The ranks whose contributions are in a slot."""
    if bits is None:
        return Text("·", style="dim")
    ranks = [str(rank) for rank in range(collective.ranks) if bits >> rank & 1]
    full = len(ranks) == collective.ranks and collective.pattern.reduces
    text = "".join(ranks)
    if collective.ranks > 10:
        text = f"{len(ranks)}/{collective.ranks}" if len(ranks) > 2 else "+".join(ranks)
    style = "bold reverse" if old != bits else "green" if full else ""
    return Text("all" if full else text, style=style)


Point = tuple[float, float]
START_S = 3.0
ROUND_S = 3.0
END_S = 5.0
_LEAVE = 0.2  # of a round
_ARRIVE = 0.75


@dataclass(frozen=True)
class Animation:
    """The loop of a schedule with so many rounds."""

    rounds: int

    @property
    def length_s(self) -> float:
        return START_S + self.rounds * ROUND_S + END_S

    def during(self, number: int) -> str:
        """Visible in one section only: 0 is the start, 1 the first round, rounds + 1 the end."""
        begin = 0.0 if number == 0 else START_S + (number - 1) * ROUND_S
        end = self.length_s if number == self.rounds + 1 else START_S + number * ROUND_S
        return self._visible(begin, end)

    def states(self, shown: list[bool]) -> str | None:
        """Lit or not: at the start, and after the arrival in each round. None if constant."""
        changes = [(0.0, shown[0])]
        for number, lit in enumerate(shown[1:]):
            if lit != changes[-1][1]:
                changes.append((START_S + (number + _ARRIVE) * ROUND_S, lit))
        return None if len(changes) == 1 else self._opacity(changes)

    def journey(self, number: int, start: Point, end: Point) -> str:
        """Moves from `start` to `end` in the middle of a round, and is visible only then."""
        begin = START_S + number * ROUND_S
        arrive = begin + _ARRIVE * ROUND_S
        here, there = (f"{x:.1f} {y:.1f}" for x, y in (start, end))
        move = self._animate(
            "animateTransform",
            [(0, here), (begin + _LEAVE * ROUND_S, here), (arrive, there), (self.length_s, there)],
            attributeName="transform",
            type="translate",
            calcMode="spline",
            keySplines="0 0 1 1;.4 0 .3 1;0 0 1 1",
        )
        return move + self._visible(begin + 0.05 * ROUND_S, arrive)

    def progress(self, x: float, y: float, width: float) -> str:
        """A bar that grows through the loop."""
        ends = [(0, "0"), (self.length_s, f"{width:.0f}")]
        grow = self._animate("animate", ends, attributeName="width")
        behind = svg.box((x, y), (width, 5), fill="#e3e8ed")
        return behind + svg.box((x, y), (0, 5), None, grow, fill="#7b8794")

    def _visible(self, begin: float, end: float) -> str:
        changes = [(0.0, False)] if begin > 0 else []
        changes.append((begin, True))
        return self._opacity(changes + ([(end, False)] if end < self.length_s else []))

    def _opacity(self, changes: list[tuple[float, bool]]) -> str:
        frames = [(second, "1" if lit else "0") for second, lit in changes]
        return self._animate("animate", frames, attributeName="opacity", calcMode="discrete")

    def _animate(self, name: str, frames: list[tuple[float, str]], **attributes: str) -> str:
        """Values by seconds of the loop."""
        keys = [f"{second / self.length_s:.5f}" for second, _ in frames]
        return svg.element(
            name,
            **attributes,
            values=";".join(value for _, value in frames),
            keyTimes=";".join(key.rstrip("0").rstrip(".") or "0" for key in keys),
            dur=f"{self.length_s:g}s",
            repeatCount="indefinite",
        )


MOST_RANKS = 16
MOST_TRANSFERS = 1500
_LAMP = 16  # pixels
_GAP = 5
_MARGIN = 24
_HEAD = 122
_STYLE = """
.title{font-size:20px;font-weight:700}.text{font-size:16px}.note{font-size:13px;fill:#5a6675}
.rank{font-size:14px;font-weight:700}.slot{font-size:12px;fill:#5a6675}
.box{fill:#fff;stroke:#9aa5b1;stroke-width:1.5}.cell{fill:#f1f4f7;stroke:#c3cbd4}
.full{fill:#d9f2e3;stroke:#2e9e5b;stroke-width:2}.off{fill:#fff;stroke:#c3cbd4}
.arrow{stroke:#1d2733;stroke-width:2;fill:none}.put{stroke-dasharray:6 4}
.token{fill:#fff8dc;stroke:#1d2733;stroke-width:1.5}
"""


@dataclass(frozen=True)
class _Plan:
    """Where everything is: sizes in pixels, and the top left corner of each rank's box."""

    collective: Collective
    columns: int
    cell: Point
    box: Point  # of a rank
    corners: list[Point]
    size: Point

    def at(self, rank: int, slot: int) -> Point:
        """The top left corner of a slot."""
        row, column = divmod(slot, self.columns)
        x, y = self.corners[rank]
        return x + 34 + column * (self.cell[0] + 34), y + 28 + row * (self.cell[1] + 4)


def animated_svg(collective: Collective) -> str:
    """The whole picture as text."""
    if collective.ranks > MOST_RANKS or collective.table.num_transfers > MOST_TRANSFERS:
        raise BadInput(
            f"{collective} has {collective.table.num_transfers} transfers, too many to watch: "
            f"ask for fewer ranks"
        )
    plan = _plan(collective)
    frames = frames_of(collective)
    animation = Animation(len(frames))
    body = [svg.TIP, _captions(plan, frames, animation), _legend(plan)]
    body += [_arrows(plan, number, frame, animation) for number, frame in enumerate(frames)]
    body += [_box(plan, rank, frames, animation) for rank in range(collective.ranks)]
    body += [
        _token(plan, number, frame, transfer, animation)
        for number, frame in enumerate(frames)
        for transfer in frame.transfers
    ]
    return svg.document(str(collective), plan.size, _STYLE, body)


def _plan(collective: Collective) -> _Plan:
    slots = collective.slots
    columns = 1 if slots <= 8 else min(math.ceil(math.sqrt(slots)), 8)
    ranks = collective.ranks
    cell = (min(ranks, 8) * _LAMP + 2 * _GAP, math.ceil(ranks / 8) * _LAMP + 2 * _GAP)
    wide = 34 + columns * (cell[0] + 34) - 22
    high = 36 + math.ceil(slots / columns) * (cell[1] + 4)
    spread = ranks / (2 * math.pi) * 1.25
    radius_x = wide * max(1.5, spread) * (ranks > 1)
    radius_y = max(high * 1.1, high * spread, 130.0) * (ranks > 1)
    width = max(2 * radius_x + wide + 2 * _MARGIN, 640)
    height = _HEAD + 2 * radius_y + high + _MARGIN + 58
    corners = []
    for rank in range(ranks):
        angle = 2 * math.pi * rank / ranks - math.pi / 2
        x = width / 2 + radius_x * math.cos(angle)
        y = _HEAD + radius_y + high / 2 + radius_y * math.sin(angle)
        corners.append((x - wide / 2, y - high / 2))
    return _Plan(collective, columns, cell, (wide, high), corners, (width, height))


def _captions(plan: _Plan, frames: list[Frame], animation: Animation) -> str:
    c = plan.collective
    name = f"{c.kind.replace('_', '-')} by {c.name.replace('_', ' ')} over {c.ranks} ranks"
    parts = [svg.text(_MARGIN, 36, name, "title")]
    lines = [("Start", opening(c)), *((s.title, s.text) for s in frames), ("End", ending(c))]
    for number, (title, words) in enumerate(lines):
        caption = animation.during(number)
        caption += svg.text(_MARGIN, 66, title, "text", font_weight="700")
        caption += svg.text(_MARGIN, 88, words, "text")
        parts.append(svg.element("g", caption, opacity=int(number == 0)))
    return "".join(parts) + animation.progress(_MARGIN, 100, plan.size[0] - 2 * _MARGIN)


def _legend(plan: _Plan) -> str:
    y = plan.size[1] - 34
    lamp = svg.element("circle", cx=_MARGIN + 6, cy=y - 5, r=5.8, fill=_hue(0))
    lit = "a lit lamp: the data of rank 0 is in this chunk, and so on, a colour for each of the "
    lit = svg.text(_MARGIN + 20, y, f"{lit}{plan.collective.ranks} ranks", "note")
    arrow = "solid arrow: what arrives is added to what is there; dashed: it takes its place"
    return lamp + lit + svg.text(_MARGIN + 20, y + 18, arrow, "note")


def _box(plan: _Plan, rank: int, frames: list[Frame], animation: Animation) -> str:
    """A rank, and the lamps of its slots through the loop."""
    x, y = plan.corners[rank]
    parts = [
        svg.box((x, y), plan.box, "box", rx=8),
        svg.element("circle", cx=x + 16, cy=y + 15, r=6, fill=_hue(rank)),
        svg.text(x + 28, y + 20, f"rank {rank}", "rank"),
    ]
    history = [initial(plan.collective), *(frame.after for frame in frames)]
    all_ranks = (1 << plan.collective.ranks) - 1
    for slot in range(plan.collective.slots):
        corner = plan.at(rank, slot)
        held = [state[rank].get(slot, 0) for state in history]
        sums = [bits == all_ranks and plan.collective.pattern.reduces for bits in held]
        full = animation.states(sums)
        parts += [_label(plan, slot, corner), svg.box(corner, plan.cell, "cell", rx=4)]
        if full:
            parts.append(svg.box(corner, plan.cell, "full", full, rx=4, opacity=0))
        for peer in range(plan.collective.ranks):
            lit = animation.states([bool(bits >> peer & 1) for bits in held])
            parts.append(_lamp(*corner, peer, held[0] >> peer & 1, lit))
    return "".join(parts)


def _label(plan: _Plan, slot: int, corner: Point) -> str:
    x = corner[0] - 5
    y = corner[1] + plan.cell[1] / 2 + 4
    return svg.text(x, y, slot_label(plan.collective, slot), "slot", text_anchor="end")


def _lamp(x: float, y: float, peer: int, first: int, changes: str | None) -> str:
    row, column = divmod(peer, 8)
    cx = x + _GAP + (column + 0.5) * _LAMP
    cy = y + _GAP + (row + 0.5) * _LAMP
    off = svg.element("circle", class_="off", cx=cx, cy=cy, r=5.8)
    if not first and changes is None:
        return off
    hue = _hue(peer)
    return off + svg.element("circle", changes or "", cx=cx, cy=cy, r=5.8, fill=hue, opacity=first)


def _arrows(plan: _Plan, number: int, frame: Frame, animation: Animation) -> str:
    ways = {(t.src, t.dst): t.reduce for t in frame.transfers if t.src != t.dst}
    lines = []
    for (src, dst), reduce in ways.items():
        (x0, y0), (x1, y1) = _between(plan, src, dst)
        kind = "arrow" if reduce else "arrow put"
        line = f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"
        lines.append(svg.path(line, kind, marker_end="url(#tip)"))
    return svg.element("g", animation.during(number + 1) + "".join(lines), opacity=0)


def _between(plan: _Plan, src: int, dst: int) -> tuple[Point, Point]:
    """From the edge of one box to the edge of the other, a little to the right of the middle."""
    wide, high = plan.box
    corners = (plan.corners[src], plan.corners[dst])
    (ax, ay), (bx, by) = ((x + wide / 2, y + high / 2) for x, y in corners)
    dx = bx - ax
    dy = by - ay
    length = math.hypot(dx, dy) or 1.0
    side_x = -dy / length * 7
    side_y = dx / length * 7
    reach_x = (wide / 2 + 6) / abs(dx) if dx else math.inf
    reach_y = (high / 2 + 6) / abs(dy) if dy else math.inf
    reach = min(reach_x, reach_y)
    start = (ax + dx * reach + side_x, ay + dy * reach + side_y)
    return start, (bx - dx * reach + side_x, by - dy * reach + side_y)


def _token(plan: _Plan, number: int, frame: Frame, t: Transfer, animation: Animation) -> str:
    """A copy of a chunk that travels from one slot to another."""
    start = plan.at(t.src, t.chunk)
    end = plan.at(t.dst, t.chunk if t.into is None else t.into)
    bits = frame.before[t.src].get(t.chunk, 0)
    peers = range(plan.collective.ranks)
    parts = (
        animation.journey(number, start, end),
        svg.box((0, 0), plan.cell, "token", rx=4),
        *(_lamp(0, 0, peer, bits >> peer & 1, None) for peer in peers),
        _label(plan, t.chunk, (0, 0)),
    )
    return svg.element("g", "".join(parts), opacity=0)


def _hue(rank: int) -> str:
    return HUES[rank] if rank < len(HUES) else f"hsl({rank * 137 % 360},55%,45%)"
