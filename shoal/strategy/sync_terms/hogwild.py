"""Hogwild: lock-free updates of one copy of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.options import FLAG


@dataclass(frozen=True, kw_only=True)
class Hogwild(SyncTerm):
    """Workers update one copy of the weights in shared memory, without locks."""

    momentum: Annotated[bool, FLAG] = False

    batches = Batches.IN_TURNS
    lockstep = False
    equals_single = False
    survives_loss = True
    takes_back = True
    needs_one_host = True
    needs_cpu = True
    why_not_split = (
        "each worker runs the whole model asynchronously, "
        "and the workers of a split model wait for each other"
    )
