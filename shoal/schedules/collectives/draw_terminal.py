"""A schedule in the terminal: round by round, which chunk goes where and what each rank holds."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from shoal.errors import BadInput
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.draw_frames import ending, frames_of, opening, slot_label
from shoal.schedules.collectives.proof import State, initial, prove

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
