"""Where the loops over `job.batches` of a script are, as a checkpoint keeps it.

A script that continues runs the same loops in the same order, so loops are known by their number.
A loop that was left, by `break` or at its end, is over once a later one begins; until then it may
go on, with more epochs or steps than before.

    loop 0     over, 7 batches               a continued script gets none of its batches
    loop 1     epoch 3, 2 batches of it      goes on with the third batch of epoch 3
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any

import msgspec

from shoal.errors import CheckpointError

_MAX_LOOPS = 10**8


@dataclass
class LoopPosition:
    """One loop. `epoch` is the number of its latest epoch among those of all loops."""

    batches: int = 0  # in all of its epochs
    epochs: int = 0  # begun
    epoch: int = 0
    in_epoch: int = 0  # batches of the latest epoch
    is_over: bool = False
    is_left: bool = False  # by `break` or at its end
    data: Any = None  # with state_dict and load_state_dict, such as a StatefulDataLoader
    state: Any = None  # of the data, in a checkpoint

    def data_state(self) -> Any:
        """None where the count has to do: between epochs, or if the state is not JSON."""
        if self.is_left or self.is_over or self.data is None or not self.in_epoch:
            return None
        state = self.data.state_dict()
        try:
            return state if json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError, RecursionError, RuntimeError):
            return None

    def advance(self, batches: int) -> None:
        self.batches += batches
        self.in_epoch += batches


@dataclass
class Positions:
    """All loops of a job. `epochs` were begun in them together."""

    epochs: int = 0
    loops: list[LoopPosition] = field(default_factory=list)
    _known: list[LoopPosition] = field(default_factory=list)  # of a checkpoint, not yet begun

    def add(self) -> LoopPosition:
        """The position of the script's next loop."""
        known = len(self.loops) < len(self._known)
        loop = self._known[len(self.loops)] if known else LoopPosition()
        self.loops.append(loop)
        return loop

    def begin(self, loop: LoopPosition) -> None:
        loop.is_left = False
        for other in self.loops:
            other.is_over |= other.is_left

    def begin_epoch(self, loop: LoopPosition) -> int:
        loop.epoch = self.epochs
        loop.in_epoch = 0
        loop.epochs += 1
        self.epochs += 1
        return loop.epoch

    def document(self) -> dict[str, Any]:
        """Equal neighbors that are over are counted: [how many, batches of each]."""
        loops = [*self.loops, *self._known[len(self.loops) :]]
        rows = [
            (loop.batches,)
            if loop.is_over
            else (loop.batches, loop.epochs, loop.epoch, loop.in_epoch)
            for loop in loops
        ]
        states = [loop.data_state() for loop in loops]
        return {
            "epochs": self.epochs,
            "loops": [[len(list(same)), *row] for row, same in groupby(rows)],
            "data": {str(i): s for i, s in enumerate(states) if s is not None},
        }


Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class _Document(msgspec.Struct, frozen=True):
    epochs: Count
    loops: list[list[Count]]
    data: dict[str, Any] = {}


def positions_of(document: Any) -> Positions:
    """Back from `Positions.document`."""
    try:
        saved = msgspec.convert(document, _Document)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"its position in the data: {error}") from error
    too_many = sum(row[0] for row in saved.loops if row) > _MAX_LOOPS
    if too_many or not all(len(row) in (2, 5) for row in saved.loops):
        raise CheckpointError("its position in the data is none")
    rows = [row for row in saved.loops for _ in range(row[0])]
    known = []
    for i, (batches, *of_epochs) in enumerate(row[1:] for row in rows):
        epochs, epoch, in_epoch = of_epochs or (0, 0, 0)
        loop = LoopPosition(batches, epochs, epoch, in_epoch, is_over=not of_epochs)
        loop.state = saved.data.get(str(i))
        known.append(loop)
    return Positions(saved.epochs, _known=known)
