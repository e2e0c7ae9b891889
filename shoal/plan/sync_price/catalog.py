"""The price of every way to agree, by the term's name in the notation."""

from __future__ import annotations

from shoal.plan.sync_price.base import PRICERS, SyncPrice, SyncQuestion
from shoal.strategy.base import SyncTerm

__all__ = ["PRICERS", "SyncPrice", "SyncQuestion", "price_of"]


def price_of(term: SyncTerm, question: SyncQuestion) -> SyncPrice:
    """What the sync term adds to the step of this question."""
    return PRICERS[term.name](term, question)
