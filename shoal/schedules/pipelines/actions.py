"""A replica's work as data: what each stage does, in which order.

A model is cut into `stages * chunks` pieces, one after the other: the virtual stages. Stage s
has the pieces s, stages + s, 2 * stages + s, …, its chunks:

    virtual = chunk * stages + stage        2 stages, 2 chunks:   stage 0 | stage 1
                                                        chunk 0      0    |    1
                                                        chunk 1      2    |    3

A schedule is a pure function `(stages, stage, microbatches[, chunks])` to the list of actions of
one stage. Sends and receives are no actions: they follow from `giver` and `taker`. A `Pipeline`
holds the lists of all stages. One stage with micro-batches is gradient accumulation:

    F0 B0 F1 B1 F2 B2 …
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import BadInput


class Kind(enum.Enum):
    """What a stage does with one micro-batch on one of its chunks.

    A backward is whole (`BACKWARD`) or split (`INPUT`, and some time later `WEIGHT`), never both.
    """

    FORWARD = "F"
    """Input: the batch on virtual stage 0, else the output of `giver`. Computes the output, goes
    to `taker`; on the last virtual stage it is the loss. Keeps what backward needs."""

    BACKWARD = "B"
    """The full backward. Input: the gradient of the chunk's output, from `giver`; on the last
    virtual stage it starts at the loss. Adds to the gradients of the chunk's weights and computes
    the gradient of its input, which goes to `taker`. All that forward kept is free afterwards."""

    INPUT = "I"
    """The first half of a split backward: as `BACKWARD`, but the gradients of the weights are left
    alone. What is kept for them (inputs of layers, gradients of their outputs) stays."""

    WEIGHT = "W"
    """The second half: adds to the gradients of the chunk's weights. It waits for nobody and sends
    nothing; all that was kept is free afterwards."""


class Action(NamedTuple):
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        """`F3`, and `F3.1` on chunk 1."""
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = Callable[[int, int, int], list[Action]]
"""(stages, stage, microbatches) -> what that stage does."""

LoopedSchedule = Callable[[int, int, int, int], list[Action]]
"""(stages, stage, microbatches, chunks) -> what that stage does."""


class Place(NamedTuple):
    """Where a virtual stage is computed."""

    stage: int
    chunk: int


def virtual_stage(stages: int, stage: int, chunk: int) -> int:
    return chunk * stages + stage


def place_of(stages: int, virtual: int) -> Place:
    chunk, stage = divmod(virtual, stages)
    return Place(stage, chunk)


def giver(stages: int, chunks: int, stage: int, action: Action) -> Place | None:
    """Whose result an action waits for: the same micro-batch, forward or backward, there.

    None: it needs nothing from another place. With one stage the giver may be the stage itself.
    """
    return _neighbour(stages, chunks, stage, action, forward=-1, backward=+1)


def taker(stages: int, chunks: int, stage: int, action: Action) -> Place | None:
    """Who waits for the result of an action; None: nobody elsewhere."""
    return _neighbour(stages, chunks, stage, action, forward=+1, backward=-1)


def _neighbour(
    stages: int, chunks: int, stage: int, action: Action, forward: int, backward: int
) -> Place | None:
    if action.kind is Kind.WEIGHT:
        return None
    step = forward if action.kind is Kind.FORWARD else backward
    virtual = virtual_stage(stages, stage, action.chunk) + step
    return place_of(stages, virtual) if 0 <= virtual < stages * chunks else None


def check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    """Refuse what is no pipeline at all."""
    for number, thing in ((stages, "stage"), (microbatches, "micro-batch"), (chunks, "chunk")):
        if number < 1:
            raise BadInput(f"a pipeline needs at least one {thing}, not {number}")


@dataclass(frozen=True)
class Pipeline:
    """The actions of every stage, in their order. `pipeline_proof.prove` checks them."""

    name: str
    microbatches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]

    def __init__(
        self, name: str, microbatches: int, chunks: int, actions: Sequence[Sequence[Action]]
    ) -> None:
        check_sizes(len(actions), microbatches, chunks)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "microbatches", microbatches)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "actions", tuple(tuple(one) for one in actions))

    @property
    def stages(self) -> int:
        return len(self.actions)

    def giver(self, stage: int, action: Action) -> Place | None:
        return giver(self.stages, self.chunks, stage, action)

    def taker(self, stage: int, action: Action) -> Place | None:
        return taker(self.stages, self.chunks, stage, action)

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks each," if self.chunks > 1 else ""
        return (
            f"{self.name} of {_many(self.stages, 'stage')}{chunks} "
            f"and {_many(self.microbatches, 'micro-batch')}"
        )


def _many(number: int, thing: str) -> str:
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{'' if number == 1 else plural}"


def accumulate(stages: int, stage: int, microbatches: int) -> list[Action]:
    """One stage: each micro-batch forward and backward in turn; one set of activations lives."""
    if stages != 1 or stage != 0:
        raise ValueError(f"accumulate is a schedule of one stage, not stage {stage} of {stages}")
    return [
        Action(kind, microbatch)
        for microbatch in range(microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
