"""Writes an MSCCL program as XML.

Attributes that Shoal adds, and other readers pass over: `root` and `same_bits` of `algo`, and the
`round` of a step, from which the schedule is read back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import quoteattr

from shoal.schedules.collectives.collective import Collective
from shoal.schedules.msccl.buffers import NAMES
from shoal.schedules.msccl.compile import compile_program
from shoal.schedules.msccl.program import Gpu, MscclProgram, MscclStep, ThreadBlock

LARGEST_BYTES = 1 << 40
RUNTIME_STEPS = 256  # of a thread block, in the runtimes that are known
RUNTIME_BLOCKS = 216  # of a GPU


def to_xml(collective: Collective) -> str:
    """The collective as an MSCCL algorithm."""
    return program_xml(compile_program(collective))


def program_xml(program: MscclProgram) -> str:
    return "\n".join(_algo(program)) + "\n"


def runtime_limits(program: MscclProgram) -> str:
    """A sentence where the known runtimes are too small for it, else nothing."""
    blocks = max(len(gpu.blocks) for gpu in program.gpus)
    steps = max((len(block.steps) for _, _, block in program.blocks()), default=0)
    if steps > RUNTIME_STEPS:
        return f"MSCCL runs {RUNTIME_STEPS} steps of a thread block, and this has {steps}"
    if blocks > RUNTIME_BLOCKS:
        return f"MSCCL runs {RUNTIME_BLOCKS} thread blocks of a GPU, and this has {blocks}"
    return ""


def _algo(program: MscclProgram) -> Iterator[str]:
    layout = program.layout
    channels = max((block.channel for _, _, block in program.blocks()), default=0) + 1
    values = {
        "name": program.name,
        "proto": "Simple",
        "nchannels": channels,
        "nchunksperloop": layout.per_loop,
        "ngpus": layout.ranks,
        "coll": NAMES[layout.kind],
        "inplace": int(layout.in_place),
        "outofplace": int(not layout.in_place),
        "minBytes": 0,
        "maxBytes": LARGEST_BYTES,
        "root": layout.root,
        "same_bits": int(program.same_bits),
    }
    yield f"<algo{_attributes(values)}>"
    for rank, gpu in enumerate(program.gpus):
        yield from _gpu(program, rank, gpu)
    yield "</algo>"


def _gpu(program: MscclProgram, rank: int, gpu: Gpu) -> Iterator[str]:
    sizes = program.layout.sizes
    values = {"id": rank, "i_chunks": sizes["i"], "o_chunks": sizes["o"]}
    yield f"  <gpu{_attributes(values | {'s_chunks': gpu.scratch_chunks})}>"
    for number, block in gpu.blocks.items():
        yield from _block(number, block)
    yield "  </gpu>"


def _block(number: int, block: ThreadBlock) -> Iterator[str]:
    values = {"id": number, "send": block.send, "recv": block.receive, "chan": block.channel}
    yield f"    <tb{_attributes(values)}>"
    for index, step in enumerate(block.steps):
        yield f"      <step{_attributes(_step(index, step))}/>"
    yield "    </tb>"


def _step(index: int, step: MscclStep) -> dict[str, object]:
    block, awaited = step.depends or (-1, -1)
    values: dict[str, object] = {
        "s": index,
        "type": step.type,
        "srcbuf": step.src.buffer,
        "srcoff": step.src.offset,
        "dstbuf": step.dst.buffer,
        "dstoff": step.dst.offset,
        "cnt": step.count,
        "depid": block,
        "deps": awaited,
        "hasdep": int(step.awaited),
    }
    return values if step.round is None else values | {"round": step.round}


def _attributes(values: Mapping[str, object]) -> str:
    return "".join(f" {name}={quoteattr(str(value))}" for name, value in values.items())
