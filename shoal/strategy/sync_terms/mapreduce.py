"""MapReduce: a master adds up the gradients of map tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.options import one_of


@dataclass(frozen=True, kw_only=True)
class Mapreduce(SyncTerm):
    """Map: the gradients of a slice of the samples; reduce: their sum and one update."""

    compared: ClassVar[tuple[str, ...]] = ('mapreduce(batch="mini")', "mapreduce")

    batch: Annotated[str, one_of("full", "mini")] = "full"

    @property
    def batches(self) -> Batches:
        return Batches.WHOLE_DATASET if self.batch == "full" else Batches.SPLIT

    why_not_own_loop = "its master alone updates, with the gradients of all map tasks"
    why_not_split = "a map task is the whole model on one worker, so that another can run it again"
