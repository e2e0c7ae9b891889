"""A schedule in the terminal: round by round, which chunk goes where and what each rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.errors import BadInput
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
    total = len(collective.table)
    for number, transfers in enumerate(collective.rounds):
        before = [dict(slots) for slots in state]
        next(running)
        after = [dict(slots) for slots in state]
        title = f"Round {number + 1} of {total}"
        text = _sentence(collective, transfers)
        frames.append(Frame(title, text, tuple(transfers), before, after))
    return frames


def opening(collective: Collective) -> str:
    plural = "chunk" if collective.chunks == 1 else "chunks"
    vectors = f"Every rank has a vector of its own, in {collective.chunks} {plural}."
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


MOST_RANKS = 32
_WIDEST = 16  # slots that still fit side by side


def draw(collective: Collective, console: Console) -> None:
    """Print every round: its messages, then a grid of ranks and chunks.

    A cell lists the ranks whose contributions are in it; what has just changed is highlighted.

        round 1   0 -c3+-> 1   1 -c0+-> 2   …        (+ adds, without it replaces)
                  c0   c1   c2   c3
        rank 0    0    0    02   0
    """
    if collective.ranks > MOST_RANKS:
        raise BadInput(
            f"a drawing of {collective.ranks} ranks is unreadable: ask for {MOST_RANKS} or fewer"
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
        arrows = [f"{src} ─{','.join(what)}→ {dst}" for (src, dst), what in by_pair.items()]
        console.print(
            Text.assemble("\n", (frame.title, "bold"), "  ", frame.text),
            Text("   ".join(arrows), style="cyan"),
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
