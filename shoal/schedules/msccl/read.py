"""An MSCCL file as a `Collective`, in rounds.

A move is as early as the data allow, and no earlier than the round that Shoal wrote for it: it
reads after what it reads was written, and writes after what was there has been read. A location
that holds a chunk becomes a slot: the slot of the chunk where it begins or ends, else scratch.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from shoal.errors import BadInput
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.collectives.proof import prove
from shoal.schedules.msccl.buffers import BufferLayout
from shoal.schedules.msccl.execute import Access, Move, MscclExecution, Place, execute
from shoal.schedules.msccl.parse import read_program
from shoal.schedules.msccl.program import MscclProgram

PASSES = 1000
Slots = dict[Place, int]


def read_collective(path: Path) -> Collective:
    """The collective of a file, proven: one that is wrong raises `ProofFailed`."""
    collective = to_collective(read_program(path), str(path))
    prove(collective)
    return collective


def to_collective(program: MscclProgram, name: str) -> Collective:
    """The collective that a program carries out."""
    execution = execute(program, name)
    _join_begin_and_end(program.layout, execution)
    _copy_inputs_first(program.layout, execution)
    slots = _slots(program.layout, execution)
    rounds = _rounds(execution, slots, name)
    return _assembled(program, execution, slots, rounds)


def _join_begin_and_end(layout: BufferLayout, execution: MscclExecution) -> None:
    """Out of place: where the output is first a copy of the input, both become the output.

    This needs an input that is never written, and not read after the output has changed.
    """
    writes: dict[Place, list[int]] = defaultdict(list)
    last_read: dict[Place, int] = {}
    for position, (number, is_write) in enumerate(execution.accesses):
        move = execution.moves[number]
        if is_write:
            assert move.dst is not None
            writes[move.dst].append(position)
        else:
            last_read[move.src] = position
    dropped: set[int] = set()
    renamed: dict[Place, Place] = {}
    for begin, end in _apart(layout):
        if begin in writes or not writes[end]:
            continue
        first = execution.accesses[writes[end][0]].move
        changed = writes[end][1] if len(writes[end]) > 1 else len(execution.accesses)
        is_copy = execution.moves[first].src == begin and not execution.moves[first].reduce
        if is_copy and last_read[begin] < changed:
            dropped.add(first)
            renamed[begin] = end
    execution.accesses[:] = [one for one in execution.accesses if one.move not in dropped]
    for move in execution.moves:
        move.src = renamed.get(move.src, move.src)


def _apart(layout: BufferLayout) -> list[tuple[Place, Place]]:
    """The places where a rank has a chunk at the start and at the end, if they differ."""
    pairs = []
    for rank in range(layout.ranks):
        for chunk in range(layout.chunks):
            begin = layout.begin(rank, chunk)
            end = layout.end(rank, chunk)
            if begin is not None and end is not None and begin != end:
                pairs.append((Place(rank, begin, chunk), Place(rank, end, chunk)))
    return pairs


def _copy_inputs_first(layout: BufferLayout, execution: MscclExecution) -> None:
    """An input that stays apart from its output is copied away: a slot is input and output."""
    used = _places(execution)
    first: list[Access] = []
    for begin, end in _apart(layout):
        if begin in used:
            execution.moves.append(Move(end, False, 0, begin))
            number = len(execution.moves) - 1
            first += [Access(number, False), Access(number, True)]
    execution.accesses[:0] = first


def _places(execution: MscclExecution) -> set[Place]:
    moves = [execution.moves[number] for number, _ in execution.accesses]
    return {move.src for move in moves} | {move.dst for move in moves if move.dst is not None}


def _slots(layout: BufferLayout, execution: MscclExecution) -> Slots:
    slots: Slots = {}
    others: dict[tuple[int, int], int] = {}
    for place in sorted(_places(execution)):
        rank, location, chunk = place
        begin = layout.begin(rank, chunk)
        end = layout.end(rank, chunk)
        if location == (end or begin):
            slots[place] = chunk
            continue
        layer = others.get((rank, chunk), 0 if begin is None and end is None else 1)
        others[rank, chunk] = layer + 1
        slots[place] = layer * layout.chunks + chunk
    return slots


def _rounds(execution: MscclExecution, slots: Slots, name: str) -> dict[int, int]:
    """The earliest round of every move: the longest path through what has to come before it."""
    edges = _constraints(execution, slots)
    alive = [one.move for one in execution.accesses if one.is_write]
    rounds = {number: execution.moves[number].round or 0 for number in alive}
    for _ in range(PASSES):
        changed = False
        for before, after, distance in edges:
            if rounds[after] < rounds[before] + distance:
                rounds[after] = rounds[before] + distance
                changed = True
        if not changed:
            return rounds
    raise BadInput(
        f"{name}: a message waits in its channel while its source is overwritten by what follows "
        "from it, which rounds of transfers cannot say"
    )


def _constraints(execution: MscclExecution, slots: Slots) -> list[tuple[int, int, int]]:
    """(before, after, distance): round of after >= round of before + distance."""
    edges: list[tuple[int, int, int]] = []
    writers: dict[tuple[int, int], list[int]] = defaultdict(list)  # the last copy, additions since
    readers: dict[tuple[int, int], list[int]] = defaultdict(list)
    last_on: dict[tuple[int, int, int], int] = {}
    for number, is_write in execution.accesses:
        move = execution.moves[number]
        place = move.dst if is_write else move.src
        assert place is not None
        key = (place.rank, slots[place])
        if not is_write:
            edges += [(writer, number, 1) for writer in writers[key]]
            readers[key].append(number)
            continue
        edges += [(reader, number, 0) for reader in readers[key] if reader != number]
        if move.reduce:
            copies = [one for one in writers[key] if not execution.moves[one].reduce]
            edges += [(writer, number, 1) for writer in copies]
            writers[key].append(number)
        else:
            edges += [(writer, number, 1) for writer in writers[key]]
            writers[key] = [number]
            readers[key] = []
        if move.connection is not None:
            if move.connection in last_on:
                edges.append((last_on[move.connection], number, 0))
            last_on[move.connection] = number
    return edges


def _assembled(
    program: MscclProgram, execution: MscclExecution, slots: Slots, rounds: dict[int, int]
) -> Collective:
    layout = program.layout
    by_round: dict[int, list[Transfer]] = defaultdict(list)
    for number, round in rounds.items():
        move = execution.moves[number]
        assert move.dst is not None
        chunk = slots[move.src]
        into = slots[move.dst]
        by_round[round].append(
            Transfer(
                move.src.rank, move.dst.rank, chunk, move.reduce, None if into == chunk else into
            )
        )
    listed = [by_round[round] for round in sorted(by_round)]
    return Collective(
        program.name,
        layout.ranks,
        layout.chunks,
        listed,
        layout.kind,
        layout.root,
        one_port=all(_is_one_port(one) for one in listed),
        scratch=max([layout.chunks - 1, *slots.values()]) + 1 - layout.chunks,
        same_bits=program.same_bits,
    )


def _is_one_port(transfers: list[Transfer]) -> bool:
    messages = {(one.src, one.dst) for one in transfers if one.src != one.dst}
    return len(messages) == len({src for src, _ in messages}) == len({dst for _, dst in messages})
