"""Executes an MSCCL program on names of chunks: what moves from where to where, in one order.

The program is refused where it would hang, lose a message, read what was never written, or depend
on the speed of its thread blocks: two steps of a GPU that touch the same location, one of them
writing, must be ordered by their thread block or by dependences on that GPU.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.schedules.msccl.buffers import Location
from shoal.schedules.msccl.program import RECEIVES, SENDS, MscclProgram, MscclStep, ThreadBlock


class Place(NamedTuple):
    """A location of a GPU while it holds a chunk."""

    rank: int
    location: Location
    chunk: int


@dataclass
class Move:
    """One chunk from a place to another; `dst` is None until it arrives."""

    src: Place
    reduce: bool
    round: int | None
    dst: Place | None = None
    connection: tuple[int, int, int] | None = None


class Access(NamedTuple):
    """A move reads its source, or writes its destination."""

    move: int
    is_write: bool


@dataclass
class MscclExecution:
    """All moves, and their reads and writes in an order in which they can happen."""

    moves: list[Move] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)


@dataclass
class _Held:
    """What a location holds, and who touched it last, as (thread block, step)."""

    chunk: int | None = None
    writer: tuple[int, int] | None = None
    readers: list[tuple[int, int]] = field(default_factory=list)


def execute(program: MscclProgram, name: str) -> MscclExecution:
    """Run all thread blocks until they end."""
    machine = _Machine(program, name)
    machine.run()
    machine.check_end()
    return machine.done


class _Machine:
    def __init__(self, program: MscclProgram, name: str):
        self._program = program
        self._layout = program.layout
        self._name = name
        self.done = MscclExecution()
        self._held: list[dict[Location, _Held]] = [
            defaultdict(_Held) for _ in range(program.layout.ranks)
        ]
        self._messages: dict[tuple[int, int, int], deque[list[int]]] = defaultdict(deque)
        self._position = {(rank, number): 0 for rank, number, _ in program.blocks()}
        self._clock: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._after: dict[tuple[int, int, int], dict[int, int]] = {}
        self._temporaries = 0
        self._fill()
        self._check_program()

    def _fill(self) -> None:
        for rank in range(self._layout.ranks):
            for chunk in range(self._layout.chunks):
                place = self._layout.begin(rank, chunk)
                if place is not None:
                    self._held[rank][place].chunk = chunk

    def _check_program(self) -> None:
        """Connections have one thread block at each end; what is waited for exists and says so."""
        ends: set[tuple[str, int, int, int]] = set()
        for rank, number, block in self._program.blocks():
            for role, peer in (("sends to", block.send), ("receives from", block.receive)):
                if peer >= 0 and (role, rank, peer, block.channel) in ends:
                    raise self._bad(
                        f"tb {number} of gpu {rank} is the second that {role} gpu {peer} on "
                        f"channel {block.channel}"
                    )
                ends.add((role, rank, peer, block.channel))
            for step in block.steps:
                self._check_dependence(rank, number, step)

    def _check_dependence(self, rank: int, number: int, step: MscclStep) -> None:
        if step.depends is None:
            return
        other, index = step.depends
        block = self._program.gpus[rank].blocks.get(other)
        if block is None or not 0 <= index < len(block.steps) or other == number:
            raise self._bad(
                f"{step.where} waits for step {index} of tb {other}, which does not exist or is "
                "its own"
            )
        if not block.steps[index].awaited:
            raise self._bad(f"{step.where} waits for step {index} of tb {other}, with hasdep=0")

    def run(self) -> None:
        waiting = deque(self._position)
        idle = 0
        while waiting and idle < len(waiting):
            rank, number = waiting.popleft()
            block = self._program.gpus[rank].blocks[number]
            moved = self._advance(rank, number, block)
            idle = 0 if moved else idle + 1
            if self._position[rank, number] < len(block.steps):
                waiting.append((rank, number))
        if waiting:
            raise self._bad(self._hang(*waiting[0]))
        for (src, dst, channel), queue in self._messages.items():
            if queue:
                raise self._bad(
                    f"gpu {src} sends {len(queue)} messages to gpu {dst} on channel {channel} "
                    "that are never received"
                )

    def check_end(self) -> None:
        for rank in range(self._layout.ranks):
            for chunk in range(self._layout.chunks):
                place = self._layout.end(rank, chunk)
                if place is not None and self._held[rank][place].chunk != chunk:
                    raise self._bad(f"gpu {rank} ends without chunk {chunk} in {place}")

    def _advance(self, rank: int, number: int, block: ThreadBlock) -> bool:
        """Do steps until one has to wait."""
        first = self._position[rank, number]
        while self._position[rank, number] < len(block.steps):
            index = self._position[rank, number]
            step = block.steps[index]
            if not self._is_ready(rank, block, step):
                break
            clock = self._clock[rank, number]
            if step.depends is not None:
                for other, seen in self._after[(rank, *step.depends)].items():
                    clock[other] = max(seen, clock.get(other, -1))
            clock[number] = index
            self._do(rank, number, block, step)
            if step.awaited:
                self._after[rank, number, index] = dict(clock)
            self._position[rank, number] += 1
        return self._position[rank, number] > first

    def _is_ready(self, rank: int, block: ThreadBlock, step: MscclStep) -> bool:
        if step.depends is not None and self._position[rank, step.depends[0]] <= step.depends[1]:
            return False
        connection = (block.receive, rank, block.channel)
        return step.type not in RECEIVES or bool(self._messages[connection])

    def _hang(self, rank: int, number: int) -> str:
        block = self._program.gpus[rank].blocks[number]
        step = block.steps[self._position[rank, number]]
        if step.depends is not None and self._position[rank, step.depends[0]] <= step.depends[1]:
            return f"it hangs: {step.where} waits for step {step.depends[1]} of tb " + str(
                step.depends[0]
            )
        return (
            f"it hangs: {step.where} waits for a message of gpu {block.receive} on channel "
            f"{block.channel}"
        )

    def _do(self, rank: int, number: int, block: ThreadBlock, step: MscclStep) -> None:
        at = (number, self._position[rank, number])
        arrived: list[int] = []
        if step.type in RECEIVES:
            arrived = self._messages[block.receive, rank, block.channel].popleft()
            if len(arrived) != step.count:
                raise self._bad(
                    f"{step.where} receives {step.count} chunks, and gpu {block.receive} sends "
                    f"{len(arrived)}"
                )
        passed_on: list[int] = []
        for i in range(step.count if step.type != "nop" else 0):
            src = self._layout.physical(rank, _moved(step.src, i))
            dst = self._layout.physical(rank, _moved(step.dst, i))
            result = self._do_chunk(rank, at, step, src, dst, arrived[i] if arrived else -1)
            if step.type in SENDS:
                connection = (rank, block.send, block.channel)
                passed_on.append(self._read(rank, at, step, result, False, connection))
        if step.type in SENDS:
            self._messages[rank, block.send, block.channel].append(passed_on)

    def _do_chunk(
        self,
        rank: int,
        at: tuple[int, int],
        step: MscclStep,
        src: Location,
        dst: Location,
        arrived: int,
    ) -> Location:
        """The local part of a step for one chunk; the location that a send then reads."""
        if step.type == "s":
            return src
        if step.type in ("cpy", "re"):
            move = self._read(rank, at, step, src, step.type == "re")
            self._write(rank, at, step, dst, move)
            return dst
        if step.type == "rrs":  # the sum is not kept
            self._temporaries += 1
            dst = Location("temporary", self._temporaries)
        if step.type in ("rrc", "rrs", "rrcs"):
            if src != dst:
                self._write(rank, at, step, dst, self._read(rank, at, step, src, False))
            self.done.moves[arrived].reduce = True
        self._write(rank, at, step, dst, arrived)
        return dst

    def _read(
        self,
        rank: int,
        at: tuple[int, int],
        step: MscclStep,
        location: Location,
        reduce: bool,
        connection: tuple[int, int, int] | None = None,
    ) -> int:
        held = self._held[rank][location]
        if held.chunk is None:
            raise self._bad(f"{step.where} reads {location}, which holds nothing yet")
        self._check_order(rank, at, step, location, [held.writer])
        held.readers.append(at)
        place = Place(rank, location, held.chunk)
        self.done.moves.append(Move(place, reduce, step.round, connection=connection))
        number = len(self.done.moves) - 1
        self.done.accesses.append(Access(number, False))
        return number

    def _write(
        self, rank: int, at: tuple[int, int], step: MscclStep, location: Location, number: int
    ) -> None:
        move = self.done.moves[number]
        held = self._held[rank][location]
        if move.reduce and held.chunk != move.src.chunk:
            holds = "nothing yet" if held.chunk is None else f"chunk {held.chunk}"
            raise self._bad(
                f"{step.where} adds chunk {move.src.chunk} to {location}, which holds {holds}"
            )
        self._check_order(rank, at, step, location, [held.writer, *held.readers])
        held.chunk = move.src.chunk
        held.writer = at
        held.readers.clear()
        move.dst = Place(rank, location, move.src.chunk)
        self.done.accesses.append(Access(number, True))

    def _check_order(
        self,
        rank: int,
        at: tuple[int, int],
        step: MscclStep,
        location: Location,
        before: list[tuple[int, int] | None],
    ) -> None:
        clock = self._clock[rank, at[0]]
        for one in before:
            if one is not None and clock.get(one[0], -1) < one[1]:
                raise self._bad(
                    f"{step.where} touches {location} as step {one[1]} of tb {one[0]} does, and "
                    "no dependence orders the two"
                )

    def _bad(self, what: str) -> BadInput:
        return BadInput(f"{self._name}: {what}")


def _moved(location: Location, by: int) -> Location:
    return Location(location.buffer, location.offset + by)
