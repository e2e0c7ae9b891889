"""The price of every way to agree, by the term's name in the notation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.plan.sync_price import SyncPrice, SyncQuestion
from shoal.plan.sync_price.ddp import ddp, localsgd, mapreduce, single
from shoal.plan.sync_price.gossip import gossip, hogwild
from shoal.plan.sync_price.ps import ps
from shoal.plan.sync_price.zero import zero
from shoal.strategy.base import SyncTerm

PRICERS: dict[str, Callable[[Any, SyncQuestion], SyncPrice]] = {
    "single": single,
    "ddp": ddp,
    "zero": zero,
    "ps": ps,
    "gossip": gossip,
    "hogwild": hogwild,
    "mapreduce": mapreduce,
    "localsgd": localsgd,
}


def price_of(term: SyncTerm, question: SyncQuestion) -> SyncPrice:
    """What the sync term adds to the step of this question."""
    return PRICERS[term.name](term, question)
