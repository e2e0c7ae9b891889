"""A collective as an MSCCL program.

Every rank has a thread block per rank that it sends to, one per rank that it receives from, and
one for local copies. Steps are in the order of rounds; within a round all sends come before all
that is written, as in `Collective`. A step waits for the steps of other thread blocks that it must
not overtake: what it reads has been written, and what it writes has been read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import BadInput
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.msccl.buffers import BufferLayout, Location, check_name
from shoal.schedules.msccl.program import Gpu, MscclProgram, MscclStep, ThreadBlock

MAX_COUNT = 64  # chunks of one step; readers take less than 72
BLOCKS_PER_CHANNEL = 32
NOWHERE = (Location("i", -1), Location("o", -1))
Block = tuple[str, int]  # ("send", peer), ("receive", peer) or ("local", -1)


def compile_program(collective: Collective) -> MscclProgram:
    """The program that does what the collective says."""
    check_name(collective.kind)
    layout = BufferLayout(
        collective.kind,
        collective.ranks,
        collective.chunks,
        collective.root,
        in_place=collective.kind != "all_to_all",
    )
    ranks = [_Rank(rank, layout, collective) for rank in range(collective.ranks)]
    for number, transfers in enumerate(collective.rounds):
        _add_round(ranks, number, transfers)
    for one in ranks:
        one.move_to_output()
    gpus = [one.gpu() for one in ranks]
    return MscclProgram(collective.name, layout, gpus, collective.same_bits)


def _add_round(ranks: list[_Rank], number: int, transfers: Sequence[Transfer]) -> None:
    pieces = _pieces(ranks, transfers)
    for piece in pieces:
        if piece.from_rank != piece.to_rank:
            ranks[piece.from_rank].send(piece, number)
    for piece in _locals_in_order(pieces, number):
        ranks[piece.to_rank].copy(piece, number)
    for piece in pieces:
        if piece.from_rank != piece.to_rank:
            ranks[piece.to_rank].receive(piece, number)


@dataclass(frozen=True)
class _Piece:
    """Chunks that lie side by side at both ends, in one step."""

    from_rank: int
    to_rank: int
    src: Location
    dst: Location
    count: int
    reduce: bool

    def touches(self, other: _Piece) -> bool:
        """Whether it writes what the other reads."""
        same = self.to_rank == other.from_rank and self.dst.buffer == other.src.buffer
        return same and abs(self.dst.offset - other.src.offset) < max(self.count, other.count)


def _pieces(ranks: list[_Rank], transfers: Sequence[Transfer]) -> list[_Piece]:
    placed = sorted(
        (
            _Piece(
                t.src,
                t.dst,
                ranks[t.src].location(t.chunk),
                ranks[t.dst].location(t.chunk if t.into is None else t.into),
                1,
                t.reduce,
            )
            for t in transfers
        ),
        key=lambda one: (one.from_rank, one.to_rank, one.reduce, one.src, one.dst),
    )
    joined: list[_Piece] = []
    for piece in placed:
        if joined and _continues(joined[-1], piece):
            last = joined.pop()
            piece = _Piece(
                last.from_rank, last.to_rank, last.src, last.dst, last.count + 1, last.reduce
            )
        joined.append(piece)
    return joined


def _continues(last: _Piece, piece: _Piece) -> bool:
    same = (last.from_rank, last.to_rank, last.reduce) == (
        piece.from_rank,
        piece.to_rank,
        piece.reduce,
    )
    return (
        same
        and piece.from_rank != piece.to_rank
        and last.count < MAX_COUNT
        and piece.src == (last.src.buffer, last.src.offset + last.count)
        and piece.dst == (last.dst.buffer, last.dst.offset + last.count)
    )


def _locals_in_order(pieces: list[_Piece], number: int) -> list[_Piece]:
    """Local copies, each after those that read what it writes."""
    waiting = [piece for piece in pieces if piece.from_rank == piece.to_rank]
    ordered: list[_Piece] = []
    while waiting:
        free = [
            one
            for one in waiting
            if not any(one is not other and one.touches(other) for other in waiting)
        ]
        if not free:
            raise BadInput(
                f"round {number} exchanges chunks within rank {waiting[0].from_rank}, which MSCCL "
                "has no step for: give it a scratch slot"
            )
        ordered += free
        waiting = [one for one in waiting if one not in free]
    return ordered


@dataclass
class _Access:
    """The last step that wrote a location, and the steps that have read it since."""

    writer: tuple[Block, int] | None = None
    readers: list[tuple[Block, int]] = field(default_factory=list)


class _Rank:
    """The thread blocks of one rank while they are made."""

    def __init__(self, rank: int, layout: BufferLayout, collective: Collective):
        self.rank = rank
        self._layout = layout
        self._scratch = _scratch_offsets(rank, layout, collective)
        self._blocks: dict[Block, list[MscclStep]] = defaultdict(list)
        self._waited: dict[tuple[Block, Block], int] = defaultdict(lambda: -1)
        self._accesses: dict[Location, _Access] = defaultdict(_Access)
        self._waits: list[tuple[MscclStep, Block, int]] = []

    def location(self, slot: int) -> Location:
        if slot in self._scratch:
            return Location("s", self._scratch[slot])
        place = _home(self._layout, self.rank, slot)
        assert place is not None
        return place

    def send(self, piece: _Piece, number: int) -> None:
        step = MscclStep("s", piece.src, piece.dst, piece.count, round=number)
        self._add(("send", piece.to_rank), step, reads=piece.src, writes=None)

    def receive(self, piece: _Piece, number: int) -> None:
        kind = "rrc" if piece.reduce else "r"
        src = piece.dst if piece.reduce else piece.src  # of an addition: the local summand
        step = MscclStep(kind, src, piece.dst, piece.count, round=number)
        self._add(("receive", piece.from_rank), step, reads=None, writes=piece.dst)

    def copy(self, piece: _Piece, number: int | None) -> None:
        kind = "re" if piece.reduce else "cpy"
        step = MscclStep(kind, piece.src, piece.dst, piece.count, round=number)
        self._add(("local", -1), step, reads=piece.src, writes=piece.dst)

    def move_to_output(self) -> None:
        """What begins and ends on this rank in two buffers: the own piece of an all-to-all."""
        layout = self._layout
        if layout.in_place:
            return
        first = (self.rank * layout.ranks + self.rank) * layout.per_unit
        for chunk in range(first, first + layout.per_unit):
            src = layout.begin(self.rank, chunk)
            dst = layout.end(self.rank, chunk)
            assert src is not None and dst is not None
            self.copy(_Piece(self.rank, self.rank, src, dst, 1, False), None)

    def gpu(self) -> Gpu:
        numbers = {block: number for number, block in enumerate(sorted(self._blocks))}
        for step, block, index in self._waits:
            step.depends = (numbers[block], index)
            self._blocks[block][index].awaited = True
        gpu = Gpu(len(self._scratch))
        for block, number in numbers.items():
            gpu.blocks[number] = self._thread_block(block)
        return gpu

    def _thread_block(self, block: Block) -> ThreadBlock:
        role, peer = block
        steps = self._blocks[block]
        send = peer if role == "send" else -1
        receive = peer if role == "receive" else -1
        ahead = peer - self.rank if role == "send" else self.rank - peer
        channel = 0 if role == "local" else ahead % self._layout.ranks // BLOCKS_PER_CHANNEL
        return ThreadBlock(send, receive, channel, steps)

    def _add(
        self, block: Block, step: MscclStep, reads: Location | None, writes: Location | None
    ) -> None:
        read = [self._accesses[one] for one in _span(reads, step.count)]
        written = [self._accesses[one] for one in _span(writes, step.count)]
        before = [one.writer for one in (*read, *written) if one.writer is not None]
        before += [reader for one in written for reader in one.readers]
        self._wait(block, step, before)
        index = len(self._blocks[block])
        self._blocks[block].append(step)
        for one in read:
            one.readers.append((block, index))
        for one in written:
            one.writer = (block, index)
            one.readers.clear()

    def _wait(self, block: Block, step: MscclStep, before: list[tuple[Block, int]]) -> None:
        """Let the step wait; a step has room for one dependence, so others go to empty steps."""
        latest: dict[Block, int] = {}
        for other, index in before:
            if other != block and index > self._waited[block, other]:
                latest[other] = max(index, latest.get(other, -1))
        listed = sorted(latest.items())
        for other, index in listed:
            self._waited[block, other] = index
        for other, index in listed[:-1]:
            empty = MscclStep("nop", *NOWHERE, 0)
            self._blocks[block].append(empty)
            self._waits.append((empty, other, index))
        for other, index in listed[-1:]:
            self._waits.append((step, other, index))


def _span(location: Location | None, count: int) -> list[Location]:
    if location is None:
        return []
    return [Location(location.buffer, location.offset + i) for i in range(count)]


def _home(layout: BufferLayout, rank: int, slot: int) -> Location | None:
    if slot >= layout.chunks:
        return None
    return layout.begin(rank, slot) or layout.end(rank, slot)


def _scratch_offsets(rank: int, layout: BufferLayout, collective: Collective) -> dict[int, int]:
    """Scratch for slots of a rank that are neither in its input nor in its output."""
    table = collective.table
    used = set(table.chunk[table.src == rank].tolist())
    used |= set(table.into[table.dst == rank].tolist())
    homeless = [slot for slot in sorted(used) if _home(layout, rank, slot) is None]
    return {slot: offset for offset, slot in enumerate(homeless)}
