"""Where the loops over `job.batches` of a script are, as a checkpoint keeps it.

A script that continues may run the same loops in the same order, or begin with the one that was
interrupted: which one its first loop is follows from their places in the script. Later loops are
known by their number. A loop that was left, by `break` or at its end, is over once a later one
begins; until then it may go on, with more epochs or steps than before.

    loop 0     over, 7 batches               a continued script gets none of its batches
    loop 1     epoch 3, 2 batches of it      goes on with the third batch of epoch 3
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any

import msgspec

from shoal.errors import BadInput, CheckpointError
from shoal.runtime.decoders import convert
from shoal.runtime.wording import counted
from shoal.train.data.loop_place import Place

_MAX_LOOPS = 10**8
_UNKNOWN = object()  # the data of loops of the run that saved


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
    place: Place | None = None  # None in checkpoints of earlier versions
    past: list[int] = field(default_factory=list)  # batches of earlier loops over the same data
    unseen: list[int] = field(default_factory=list)  # of these, where this script did not run them

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
    """All loops of a job. `epochs` were begun in them together.

    `turn` is the latest of `job.epochs`. `is_asked`: the script itself has loaded the checkpoint.
    """

    epochs: int = 0
    loops: list[LoopPosition] = field(default_factory=list)
    _known: list[LoopPosition] = field(default_factory=list)  # of a checkpoint, not yet begun
    turn: int | None = None
    is_asked: bool = False
    in_epochs: bool = False  # the script loops over job.epochs
    note: str = ""  # about the first loop, for the user
    _saved_at: list[int] = field(default_factory=list)  # lines of the calls that saved
    _may_lack: list[int] = field(default_factory=list)  # in epoch 0, the loops behind these lines
    _latest: dict[str, tuple[Any, LoopPosition]] = field(default_factory=dict)  # data, of each site

    def add(self, place: Place, data: Any, lines: Sequence[int] = ()) -> LoopPosition:
        """The position of the script's next loop."""
        if self._known and not self.loops:
            self.loops = self._known[: self._first(place)]
            for passed in self.loops:
                passed.is_over = True
                if passed.place is not None:
                    self._latest[passed.place.site] = _UNKNOWN, passed
        is_known = len(self.loops) < len(self._known)
        loop = self._known[len(self.loops)] if is_known else LoopPosition()
        before, latest = self._latest.get(place.site, (_UNKNOWN, None))
        is_new = latest is None and place.counters[:1] == (1,) and not is_known
        if is_new and self._may_lack and list(lines) > self._may_lack:
            raise BadInput(
                "the checkpoint was saved in epoch 0 of job.epochs before this loop over "
                "job.batches, which may be lost: save at the end of an epoch, or inside a loop"
            )
        is_same = before is data or (before is _UNKNOWN and not isinstance(data, Iterator))
        if latest is not None and is_same and not is_known:
            loop.past = [*latest.past, latest.batches]
            latest.past = []
        if before is _UNKNOWN:
            loop.unseen = list(loop.past)
        if is_known and (loop.is_over or loop.is_left) and place.counters and not self.in_epochs:
            self.note = (
                "epochs that were finished before the checkpoint run without batches: write `for "
                "epoch in job.epochs(n):` to begin with the one that is left"
            )
        loop.place = place
        self._latest[place.site] = data, loop
        self.loops.append(loop)
        return loop

    def _first(self, place: Place) -> int:
        """The number of the script's first loop after a checkpoint, where that can be proven."""
        places = [loop.place for loop in self._known]
        turns = [other.turns for other in places if other and other.site == place.site]
        if place.turns is not None and place in places:
            return places.index(place)
        if places[0] and not turns:  # another loop, such as that of a script for fine-tuning
            self.note = (
                f"the checkpoint knows no loop over job.batches at {place.call}, but at "
                f"{places[0].call}: this one begins with its first batch"
            )
            return len(places)
        if place.turns is not None and all(t is not None and t < place.turns for t in turns):
            return len(places)
        if self.is_asked and (self._known[0].is_over or self._known[0].is_left):
            raise BadInput(
                f"{counted(len(places), 'loop')} over job.batches had begun when the checkpoint "
                "was saved, and it cannot be told which of them the first one after job.load is: "
                "write `for epoch in job.epochs(n):` around it, or job.batches(…, epochs=n)"
            )
        return 0

    def is_counted(self, counters: Sequence[int | None]) -> bool:
        """Whether a loop that counts, such as over a range, is around these and the latest loop."""
        latest = self.loops[-1].place if self.loops else None
        return latest is not None and counters[:1] == latest.counters[:1] not in ((), (None,))

    @property
    def has_reached_all(self) -> bool:
        """Whether the script has come as far as the run that saved."""
        return len(self.loops) >= len(self._known)

    def turns_left(self, number: int) -> range:
        """Of `job.epochs`; the latest one again where it lacks a loop that the one before had."""
        self.in_epochs = True
        places = [loop.place for loop in self._known if loop.place and loop.place.counters]
        latest = {place.site: place.counters[0] for place in places}.values()
        is_left = all(loop.is_left or loop.is_over for loop in self._known)
        is_left &= not self.turn or not {self.turn, self.turn - 1} <= set(latest)
        self._may_lack = self._saved_at if self.turn == 0 and is_left else []
        begun = len(self._known) if self.turn is None else self.turn + 1
        return range(begun if is_left else begun - 1, number)

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

    def document(self, lines: Sequence[int] = ()) -> dict[str, Any]:
        """Equal neighbors that are over are counted: [how many, batches of each]."""
        loops = [*self.loops, *self._known[len(self.loops) :]]
        rows = [
            (loop.batches,)
            if loop.is_over
            else (loop.batches, loop.epochs, loop.epoch, loop.in_epoch, int(loop.is_left))
            for loop in loops
        ]
        states = [loop.data_state() for loop in loops]
        ends = {id(loop) for loop in (*loops[:1], *(loop for _, loop in self._latest.values()))}
        return {
            "epochs": self.epochs,
            "loops": _counted(rows),
            "data": {str(i): s for i, s in enumerate(states) if s is not None},
            "places": {
                str(i): [loop.place.site, loop.place.counters, _counted((n,) for n in loop.past)]
                for i, loop in enumerate(loops)
                if loop.place and (not loop.is_over or id(loop) in ends)
            },
            "turn": self.turn,
            "lines": list(lines),
        }


def _counted(rows: Iterable[tuple[int, ...]]) -> list[list[int]]:
    return [[len(list(same)), *row] for row, same in groupby(rows)]


Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class _Document(msgspec.Struct, frozen=True):
    epochs: Count
    loops: list[list[Count]]
    data: dict[str, Any] = {}
    places: dict[str, tuple[str, list[int | None], list[tuple[Count, Count]]]] = {}
    turn: Count | None = None
    lines: list[int] = []


def positions_of(document: Any) -> Positions:
    """Back from `Positions.document`."""
    try:
        saved = convert(document, _Document)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"its position in the data: {error}") from error
    past = [row for *_, past in saved.places.values() for row in past]
    too_many = sum(row[0] for row in (*saved.loops, *past) if row) > _MAX_LOOPS
    if too_many or not all(len(row) in (2, 6) for row in saved.loops):
        raise CheckpointError("its position in the data is none")
    rows = [row for row in saved.loops for _ in range(row[0])]
    known = []
    for i, (batches, *of_epochs) in enumerate(row[1:] for row in rows):
        epochs, epoch, in_epoch, left = of_epochs or (0, 0, 0, 0)
        loop = LoopPosition(batches, epochs, epoch, in_epoch, not of_epochs, bool(left))
        loop.state = saved.data.get(str(i))
        if (place := saved.places.get(str(i))) is not None:
            loop.place = Place(place[0], tuple(place[1]))
            loop.past = [batches for n, batches in place[2] for _ in range(n)]
        known.append(loop)
    return Positions(saved.epochs, _known=known, turn=saved.turn, _saved_at=saved.lines)
