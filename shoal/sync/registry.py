"""From a term to its plan.

The module of a plan is named by its term (`sync_module`) and is imported when it is first asked
for. It registers the plan with `@runs(Ddp)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.strategy.base import SyncTerm
from shoal.sync.base import SyncPlan

P = TypeVar("P", bound=type[SyncPlan[Any]])
_PLANS: dict[type[SyncTerm], type[SyncPlan[Any]]] = {}


def runs(kind: type[SyncTerm]) -> Callable[[P], P]:
    """Register the decorated class as the plan of a term."""

    def register(plan: P) -> P:
        _PLANS[kind] = plan
        return plan

    return register


def plan_for(term: SyncTerm) -> SyncPlan[Any]:
    """What `term` means at run time."""
    importlib.import_module(term.sync_module)
    return _PLANS[type(term)](term)
