"""A replica's work as data: what each stage does, in which order.

One stage with micro-batches is gradient accumulation:

    F0 B0 F1 B1 F2 B2 …

Schedules of several stages add the transfers between them; the engine interprets them all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class Kind(enum.Enum):
    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Schedule = Callable[[int, int, int], list[Action]]
"""(stages, stage, microbatches) -> what that stage does."""


def accumulate(stages: int, stage: int, microbatches: int) -> list[Action]:
    """One stage: each micro-batch forward and backward in turn; one set of activations lives."""
    if stages != 1 or stage != 0:
        raise ValueError(f"accumulate is a schedule of one stage, not stage {stage} of {stages}")
    return [
        Action(kind, microbatch)
        for microbatch in range(microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
