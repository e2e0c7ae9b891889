"""single: one replica, which has nothing to agree on."""

from __future__ import annotations

from typing import Any

from shoal.plan.sync_price.base import (
    SyncPrice,
    SyncQuestion,
    plain_memory,
    prices,
    some,
    synchronous_spread,
    update_part,
    waiting_part,
)


@prices("single")
def single(term: Any, question: SyncQuestion) -> SyncPrice:
    parts = some(waiting_part(question), update_part(question))
    return SyncPrice(parts, plain_memory(question), spread_s=synchronous_spread(question))
