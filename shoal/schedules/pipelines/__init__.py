"""Pipeline schedules as data: the actions of each stage; built and proven."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.runtime.wording import counted


class ActionKind(enum.Enum):
    """What a stage does with one micro-batch on one of its chunks.

    A backward is whole (`BACKWARD`) or split (`INPUT`, and some time later `WEIGHT`), never both.
    """

    FORWARD = "F"
    """Input: the batch on virtual stage 0, else the output of `producer`. The output goes to
    `consumer`; on the last virtual stage it is the loss. Keeps what backward needs."""

    BACKWARD = "B"
    """The full backward. Input: the gradient of the chunk's output, from `producer`; on the last
    virtual stage it starts at the loss. Adds to the gradients of the chunk's weights and computes
    the gradient of its input, which goes to `consumer`. What forward kept is free afterwards."""

    INPUT = "I"
    """The first half of a split backward: as `BACKWARD`, without the gradients of the weights.
    What they need (inputs of layers, gradients of their outputs) is kept."""

    WEIGHT = "W"
    """The second half: adds to the gradients of the chunk's weights. It receives and sends
    nothing; all that was kept is free afterwards."""

    __hash__ = object.__hash__  # that of Enum is Python, and takes 3 times as long


class Action(NamedTuple):
    kind: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """`F3`, and `F3.1` on chunk 1."""
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class VirtualStage(NamedTuple):
    """A virtual stage: the stage that computes it, and which of its chunks it is."""

    stage: int
    chunk: int


def virtual_index(stages: int, stage: int, chunk: int) -> int:
    """The position of a virtual stage in the model, from 0 on."""
    return chunk * stages + stage


def locate(stages: int, virtual: int) -> VirtualStage:
    """The inverse of `virtual_index`."""
    chunk, stage = divmod(virtual, stages)
    return VirtualStage(stage, chunk)


def _neighbour(pipeline: Pipeline, stage: int, action: Action, step: int) -> VirtualStage | None:
    """The virtual stage so many steps further in the direction of an action; WEIGHT has none."""
    if action.kind is ActionKind.WEIGHT:
        return None
    step = step if action.kind is ActionKind.FORWARD else -step
    virtual = virtual_index(pipeline.stages, stage, action.chunk) + step
    if 0 <= virtual < pipeline.stages * pipeline.chunks:
        return locate(pipeline.stages, virtual)
    return None


def check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    for number, noun in ((stages, "stage"), (microbatches, "micro-batch"), (chunks, "chunk")):
        if number < 1:
            raise BadInput(f"a pipeline needs at least one {noun}, not {number}")


@dataclass(frozen=True)
class Pipeline:
    """The actions of every stage, in order. `proof.prove` checks them."""

    name: str
    microbatches: int
    chunks: int
    actions: Sequence[Sequence[Action]]

    def __post_init__(self) -> None:
        check_sizes(self.stages, self.microbatches, self.chunks)
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))

    @property
    def stages(self) -> int:
        return len(self.actions)

    def producer(self, stage: int, action: Action) -> VirtualStage | None:
        """The virtual stage whose result an action needs; None if it needs none."""
        return _neighbour(self, stage, action, -1)

    def consumer(self, stage: int, action: Action) -> VirtualStage | None:
        """The virtual stage that needs the result of an action; None if none does."""
        return _neighbour(self, stage, action, +1)

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks each," if self.chunks > 1 else ""
        return (
            f"{self.name} of {counted(self.stages, 'stage')}{chunks} "
            f"and {counted(self.microbatches, 'micro-batch', 'micro-batches')}"
        )


def accumulate(microbatches: int) -> list[Action]:
    """One stage: forward and backward of each micro-batch in turn, with one set of activations."""
    return [
        Action(kind, microbatch)
        for microbatch in range(microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    ]
