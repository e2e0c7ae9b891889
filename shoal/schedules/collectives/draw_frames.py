"""The frames of a schedule: what moves in each round, and what every rank holds afterwards.

The terminal drawing and the animated picture are both made of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.proof import State, initial, states
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
    """One round: its transfers, one sentence about them, and the state before and after."""

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
