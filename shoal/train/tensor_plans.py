"""Several models of a loop under tp: what of its plan is for which of them.

A model in which nothing can be split stays whole beside one that is split, with a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shoal.replica.tensor.planning.plan import plan_of
from shoal.replica.tensor.planning.unsplit import NothingToSplit, plan_for
from shoal.strategy.split_terms import Tp
from shoal.train.step_context import StepContext


def tensor_plans(
    models: Sequence[nn.Module], whole: Sequence[bool], context: StepContext
) -> list[Tp | None]:
    """tp for each model, with the part of the plan that is about it; some are `whole` anyway."""
    tp = context.strategy.tp
    if tp is None or context.mesh.tp.size == 1 or list(whole).count(False) < 2:
        return [tp] * len(models)
    plans = [plan_for(model, tp.plan or {}) for model in models]
    if any(all(pattern not in plan for plan in plans) for pattern in tp.plan or {}):
        return [tp] * len(models)  # refused by name
    tps = [replace(tp, plan=plan or None) for plan in plans]
    unsplit = [None if w else _nothing_in(m, t) for m, t, w in zip(models, tps, whole, strict=True)]
    if all(w or found is not None for w, found in zip(whole, unsplit, strict=True)):
        return [tp] * len(models)  # refused: nothing is split at all
    for model, found in zip(models, unsplit, strict=True):
        if found is not None:
            why = f" ({'; '.join(found.reasons)})" if found.reasons else ""
            context.say(f"{type(model).__name__} stays whole under {tp}: nothing to split{why}")
    return [t if found is None else None for t, found in zip(tps, unsplit, strict=True)]


def _nothing_in(model: nn.Module, tp: Tp) -> NothingToSplit | None:
    try:
        plan_of(model, tp)
    except NothingToSplit as found:
        return found
    return None
