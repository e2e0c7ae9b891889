"""An MSCCL program: GPUs, thread blocks and steps, as its file has them.

A thread block does its steps one after the other. It sends to at most one GPU and receives from
at most one; all thread blocks run at the same time. A step may wait for a step of another thread
block of its GPU (`depends`). The k-th send on a connection (from, to, channel) meets the k-th
receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.schedules.msccl.buffers import BufferLayout, Location

RECEIVES = ("r", "rrc", "rcs", "rrs", "rrcs")
SENDS = ("s", "rcs", "rrs", "rrcs")
TYPES = (*dict.fromkeys((*SENDS, *RECEIVES)), "cpy", "re", "nop")


@dataclass
class MscclStep:
    """What a thread block does with `count` chunks from `src` on, or into those from `dst` on.

    The other side's location is in the file for its reader's eyes; a receive is what decides
    where data goes.
    """

    type: str
    src: Location
    dst: Location
    count: int
    depends: tuple[int, int] | None = None  # thread block, step
    awaited: bool = False  # `hasdep`: another step waits for it
    round: int | None = None  # Shoal's own: the round of the schedule that it comes from
    where: str = ""


@dataclass
class ThreadBlock:
    send: int
    receive: int
    channel: int
    steps: list[MscclStep] = field(default_factory=list)


@dataclass
class Gpu:
    scratch_chunks: int
    blocks: dict[int, ThreadBlock] = field(default_factory=dict)


@dataclass
class MscclProgram:
    name: str
    layout: BufferLayout
    gpus: list[Gpu]
    same_bits: bool = False

    def blocks(self) -> Iterator[tuple[int, int, ThreadBlock]]:
        """Every thread block with its GPU and number."""
        for rank, gpu in enumerate(self.gpus):
            for number, block in gpu.blocks.items():
                yield rank, number, block
