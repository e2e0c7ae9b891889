"""A schedule in the terminal: round by round, which chunk goes where and what each rank holds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.errors import BadInput
from shoal.schedules.collectives.collective import Collective
from shoal.schedules.collectives.proof import State, initial, prove
from shoal.schedules.drawing.frames import ending, frames_of, opening, slot_label

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
    slots = list(range(collective.slots))
    if len(slots) > _WIDEST:
        return _lists(collective, state, before)
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    grid.add_column("")
    for slot in slots:
        grid.add_column(slot_label(collective, slot), style="dim", header_style="dim")
    for rank, held in enumerate(state):
        cells = [_cell(collective, held.get(slot), _old(before, rank, slot)) for slot in slots]
        grid.add_row(f"rank {rank}", *cells)
    return grid


def _lists(collective: Collective, state: State, before: State | None) -> Grid:
    """For many chunks: a line of what each rank holds."""
    grid = Grid(box=None, padding=(0, 2, 0, 0), show_header=False)
    for rank, held in enumerate(state):
        line = Text()
        for slot in sorted(held)[:_WIDEST]:
            value = _cell(collective, held[slot], _old(before, rank, slot))
            line.append(f"{slot_label(collective, slot)}:", "dim").append_text(value).append(" ")
        if len(held) > _WIDEST:
            line.append(f"… {len(held) - _WIDEST} more", "dim")
        grid.add_row(f"rank {rank}", line)
    return grid


def _old(before: State | None, rank: int, slot: int) -> int | None:
    return -1 if before is None else before[rank].get(slot)


def _cell(collective: Collective, bits: int | None, old: int | None) -> Text:
    if bits is None:
        return Text("·", style="dim")
    ranks = [rank for rank in range(collective.ranks) if bits >> rank & 1]
    full = len(ranks) == collective.ranks and collective.pattern.reduces
    text = "all" if full else _listed(ranks, collective.ranks)
    changed = old != -1 and old != bits
    return Text(text, style="bold reverse" if changed else ("green" if full else ""))


def _listed(ranks: list[int], size: int) -> str:
    if size <= 10:
        return "".join(map(str, ranks))
    return f"{len(ranks)}/{size}" if len(ranks) > 2 else "+".join(map(str, ranks))
