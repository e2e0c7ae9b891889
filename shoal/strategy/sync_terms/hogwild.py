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

    @property
    def batches(self) -> Batches:
        return Batches.IN_TURNS

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def equals_single(self) -> bool:
        return False

    @property
    def survives_loss(self) -> bool:
        return True

    @property
    def takes_back(self) -> bool:
        return True

    @property
    def needs_one_host(self) -> bool:
        return True

    @property
    def needs_cpu(self) -> bool:
        return True

    @property
    def why_not_split(self) -> str | None:
        return (
            "each worker runs the whole model asynchronously, "
            "and the workers of a split model wait for each other"
        )
