"""Reads an MSCCL file into a `MscclProgram`; every number is checked before it is used.

Expat reads the file without following anything that it names: a document type, and with it any
entity, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.parsers import expat

from shoal.errors import BadInput
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.msccl.buffers import KIND_OF, BufferLayout, Location
from shoal.schedules.msccl.program import (
    RECEIVES,
    SENDS,
    TYPES,
    Gpu,
    MscclProgram,
    MscclStep,
    ThreadBlock,
)
from shoal.schedules.suggest import nearest

MAX_BYTES = 256 << 20
MAX_GPUS = 4096
MAX_CHUNKS = 1 << 20
MAX_MOVED = 4_000_000  # chunks of all steps together
_PARENTS = {"algo": None, "gpu": "algo", "tb": "gpu", "step": "tb"}


def read_program(path: Path) -> MscclProgram:
    """The program of a file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    return parse_program(data, str(path))


def parse_program(data: bytes, name: str) -> MscclProgram:
    """The program of a document; `name` is what errors call it."""
    reader = _Reader(name)
    try:
        reader.parser.Parse(data, True)
    except expat.ExpatError as error:
        what = expat.errors.messages[error.code]
        raise BadInput(f"{name}, line {error.lineno}: this is no XML: {what}") from error
    return reader.finish()


class _Reader:
    """Builds the program from the elements as they come."""

    def __init__(self, name: str):
        self.name = name
        self.parser = expat.ParserCreate()
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self._open: list[str] = []
        self._program: MscclProgram | None = None
        self._found: dict[int, Gpu] = {}
        self._gpu = Gpu(0)
        self._rank = 0
        self._block = ThreadBlock(-1, -1, 0)
        self._number = 0
        self._moved = 0

    def finish(self) -> MscclProgram:
        if self._program is None:
            raise BadInput(f"{self.name} has no element <algo>")
        missing = [rank for rank in range(len(self._program.gpus)) if rank not in self._found]
        if missing:
            raise BadInput(
                f"{self.name}: <algo> has ngpus={len(self._program.gpus)}, and there is no "
                f'<gpu id="{missing[0]}">'
            )
        self._program.gpus[:] = [self._found[rank] for rank in range(len(self._found))]
        return self._program

    def _doctype(self, *unused: object) -> None:
        raise self._bad("a document type or entity is not allowed here")

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        parent = self._open[-1] if self._open else None
        if element not in _PARENTS or _PARENTS[element] != parent:
            inside = f" inside of <{parent}>" if parent else " at the top"
            raise self._bad(f"<{element}>{inside} is not MSCCL")
        self._open.append(element)
        values = _Attributes(self, element, attributes)
        if element == "algo":
            self._program = self._algo(values)
        elif element == "gpu":
            self._start_gpu(values)
        elif element == "tb":
            self._start_block(values)
        else:
            self._block.steps.append(self._step(values))

    def _end(self, element: str) -> None:
        self._open.pop()

    def _algo(self, values: _Attributes) -> MscclProgram:
        ranks = values.number("ngpus", 1, MAX_GPUS)
        per_loop = values.number("nchunksperloop", 1, MAX_CHUNKS)
        called = values.text("coll")
        if called not in KIND_OF:
            hint = nearest(called, KIND_OF)
            raise self._bad(f'<algo> has coll="{called}", which Shoal cannot prove; {hint}')
        kind = KIND_OF[called]
        root = values.number("root", 0, ranks - 1, default=0)
        in_place = values.number("inplace", 0, 1) == 1
        chunks = per_loop * ranks if kind == "all_to_all" else per_loop
        if chunks % kind_named(kind).units(ranks):
            raise self._bad(
                f'<algo> has nchunksperloop="{per_loop}", and {called} over {ranks} GPUs needs a '
                f"multiple of {ranks}"
            )
        layout = BufferLayout(kind, ranks, chunks, root, in_place)
        same_bits = values.number("same_bits", 0, 1, default=0) == 1
        return MscclProgram(values.text("name"), layout, [Gpu(0) for _ in range(ranks)], same_bits)

    def _start_gpu(self, values: _Attributes) -> None:
        assert self._program is not None
        self._rank = values.number("id", 0, len(self._program.gpus) - 1)
        if self._rank in self._found:
            raise self._bad(f'there are two <gpu id="{self._rank}">')
        self._gpu = Gpu(values.number("s_chunks", 0, MAX_CHUNKS, default=0))
        self._found[self._rank] = self._gpu

    def _start_block(self, values: _Attributes) -> None:
        assert self._program is not None
        last = len(self._program.gpus) - 1
        self._number = values.number("id", 0, MAX_CHUNKS)
        if self._number in self._gpu.blocks:
            raise self._bad(f'gpu {self._rank} has two <tb id="{self._number}">')
        send = values.number("send", -1, last)
        receive = values.number("recv", -1, last)
        if self._rank in (send, receive):
            raise self._bad(f"tb {self._number} of gpu {self._rank} has its own gpu as its peer")
        self._block = ThreadBlock(send, receive, values.number("chan", 0, MAX_CHUNKS))
        self._gpu.blocks[self._number] = self._block

    def _step(self, values: _Attributes) -> MscclStep:
        index = values.number("s", 0, MAX_CHUNKS)
        where = f"gpu {self._rank}, tb {self._number}, step {index}"
        if index != len(self._block.steps):
            raise self._bad(f"{where} should be step {len(self._block.steps)}: they count from 0")
        kind = values.text("type")
        if kind not in TYPES:
            raise self._bad(f'{where} has type="{kind}"; known are {", ".join(TYPES)}')
        if kind in SENDS and self._block.send < 0:
            raise self._bad(f"{where} sends, and its tb has no peer to send to")
        if kind in RECEIVES and self._block.receive < 0:
            raise self._bad(f"{where} receives, and its tb has no peer to receive from")
        return self._filled(kind, values, where)

    def _filled(self, kind: str, values: _Attributes, where: str) -> MscclStep:
        moves = kind != "nop"
        count = values.number("cnt", 1 if moves else 0, MAX_CHUNKS)
        self._moved += count
        if self._moved > MAX_MOVED:
            raise self._bad(f"the steps move more than {MAX_MOVED:,} chunks in all")
        src = self._location(values, "src", count, kind in ("s", "rrc", "rrs", "rrcs", "cpy", "re"))
        dst = self._location(values, "dst", count, moves and kind not in ("s", "rrs"))
        block = values.number("depid", -1, MAX_CHUNKS, default=-1)
        step = values.number("deps", -1, MAX_CHUNKS, default=-1)
        hint = values.number("round", -1, MAX_MOVED, default=-1)
        return MscclStep(
            kind,
            src,
            dst,
            count,
            (block, step) if block >= 0 else None,
            values.number("hasdep", 0, 1, default=0) == 1,
            hint if hint >= 0 else None,
            where,
        )

    def _location(self, values: _Attributes, side: str, count: int, is_used: bool) -> Location:
        """The first location of a step; one on this GPU has to be in its buffer."""
        assert self._program is not None
        buffer = values.text(f"{side}buf")
        sizes = self._program.layout.sizes | {"s": self._gpu.scratch_chunks}
        if buffer not in sizes:
            raise self._bad(f'<step> has {side}buf="{buffer}"; known are i, o and s')
        last = sizes[buffer] - count if is_used else MAX_CHUNKS
        if is_used and last < 0:
            raise self._bad(
                f'<step> has cnt="{count}", and buffer {buffer} of gpu {self._rank} has '
                f"{sizes[buffer]} chunks"
            )
        return Location(buffer, values.number(f"{side}off", 0 if is_used else -1, last))

    def _bad(self, what: str) -> BadInput:
        return BadInput(f"{self.name}, line {self.parser.CurrentLineNumber}: {what}")


class _Attributes:
    """The attributes of one element."""

    def __init__(self, reader: _Reader, element: str, values: Mapping[str, str]):
        self._reader = reader
        self._element = element
        self._values = values

    def text(self, name: str) -> str:
        if name not in self._values:
            raise self._reader._bad(f"<{self._element}> lacks the attribute {name}")
        return self._values[name][:200]

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        if name not in self._values and default is not None:
            return default
        text = self.text(name)
        number = int(text) if text.lstrip("-").isdecimal() and len(text) < 20 else None
        if number is None or not least <= number <= most:
            raise self._reader._bad(
                f'<{self._element}> has {name}="{text[:40]}", and takes {least} to {most}'
            )
        return number
