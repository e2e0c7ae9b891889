"""What `job.setup` does: models and optimizers become parts, each with its own sync.

    part = parameters of one model that one optimizer updates, either trained or frozen at the start

A frozen part costs no communication until it is trained. Parts of one model share its shard.
"""

from __future__ import annotations

import copy
import fnmatch
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.errors import BadInput, NotBuilt
from shoal.server.embedding.module import Embedding
from shoal.strategy.base import SyncTerm
from shoal.strategy.split_terms import Tp
from shoal.train.own_loop.optimizer import PartOptimizers, params_of
from shoal.train.own_loop.part import LoopPart
from shoal.train.same_rules import check_same_optimizers
from shoal.train.step.build import assemble_step, broadcast_start
from shoal.train.step.options import StepFunctions, StepOptions
from shoal.train.step.prepare_model import PreparedModel, prepare_model
from shoal.train.step.run_services import StepContext

Taken = MutableMapping[Any, str]


def tensor_plans(models: Sequence[nn.Module], tp: Tp | None) -> list[Tp | None]:
    """tp for each model, with the part of the plan that is about it."""
    if tp is None or tp.plan is None:
        return [tp] * len(models)
    plans: list[dict[str, str]] = []
    for model in models:
        names = [name for name, _ in model.named_modules()]
        named = [(p, kind) for p, kind in tp.plan.items() if fnmatch.filter(names, p)]
        plans.append(dict(named))
    if any(all(pattern not in plan for plan in plans) for pattern in tp.plan):
        return [tp] * len(models)  # refused by name
    return [replace(tp, plan=plan or None) for plan in plans]


class LooseParameters(nn.Module):
    """Parameters of an optimizer that are in no model, such as a temperature."""

    def __init__(self, params: Sequence[nn.Parameter]):
        super().__init__()
        for i, p in enumerate(params):
            self.register_parameter(str(i), p)


def loop_term(context: StepContext) -> SyncTerm:
    """The term of a loop of the user's own; BadInput where the strategy splits the loop itself."""
    strategy = context.strategy
    if strategy.pp is not None and strategy.pp.size > 1:
        raise BadInput(
            f"{strategy.pp} interleaves forward and backward passes of several stages, so it has "
            "to run the loop itself: use job.step, or leave pp out of the strategy"
        )
    term = strategy.sync_for(context.mesh.dp.size)
    if term.why_not_own_loop is not None:
        raise BadInput(f"{term} trains by job.step, not by job.setup: {term.why_not_own_loop}")
    return term.in_own_loop()


def set_up(
    models: list[nn.Module],
    optimizers: list[Any],
    context: Callable[[], StepContext],
    taken: Taken,
    parts: list[LoopPart],
    options: StepOptions,
) -> tuple[list[PreparedModel], list[tuple[torch.optim.Optimizer, list[LoopPart]]]]:
    """What was made of models, and of optimizers. All ranks call it together.

    `taken` and `parts` are those of earlier calls; they grow. `taken` are parameters that
    `job.setup` has had, and what splitting has put in their place, by name.
    """
    term = loop_term(context())
    for name, module in ((n, m) for model in models for n, m in model.named_modules()):
        if isinstance(module, Embedding):
            raise NotBuilt(
                f"shoal.Embedding ({name or 'the model'}) trains by job.step, not by "
                "job.setup: use nn.Embedding"
            )
    pairs = (  # for one factory: of several optimizers each has to know its own parameters
        (name if len(models) == 1 else f"{i}.{name}", p)
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
    )
    made = [o if isinstance(o, torch.optim.Optimizer) else o(pairs) for o in optimizers]
    _refuse_taken(models, made, taken)
    if term.lockstep:
        check_same_optimizers(context().mesh.world, made)
    known = {id(p) for model in models for p in model.parameters()}
    if loose := [p for o in made for p in params_of(o) if id(p) not in known]:
        models = [*models, LooseParameters(loose)]
    places = {id(p): (i, n) for i, model in enumerate(models) for n, p in model.named_parameters()}
    names = [[places[id(p)] for p in params_of(optimizer)] for optimizer in made]
    taken.update(_named(models))
    prepared = _prepare(models, term, context, options)
    taken.update(_named(models))
    for optimizer, of_optimizer in zip(made, names, strict=True):
        _take_params(optimizer, of_optimizer, models)
    updates = [
        (o, _build_parts(o, names_of, prepared, parts, context))
        for o, names_of in zip(made, names, strict=True)
    ]
    trained = [p for part in parts for p in part.params]
    for model in models:
        broadcast_start(model, trained, context().mesh.dp)
    return prepared, updates


def _refuse_taken(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], taken: Taken
) -> None:
    """Refuse a model that `job.setup` has had, and a second optimizer of a parameter.

    It would find gradients and weights that belong to the first, and a checkpoint has one state.
    """
    params = [p for o in optimizers for p in params_of(o)]
    counts = Counter(map(id, params))
    names = {id(p): name for m in models for name, p in m.named_parameters()}
    twice = [names.get(i, "a parameter") for i, count in counts.items() if count > 1]
    given = [*params, *(p for model in models for p in model.parameters())]
    again = [*twice, *(taken[p] for p in given if p in taken)]
    if again:
        raise BadInput(
            f"job.setup was given {again[0]} twice: a model is set up once, and each parameter has "
            "one optimizer. Give it all parameters before job.setup, also those that are frozen at "
            "first (requires_grad=False), and change param_groups for another phase"
        )


def _named(models: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    return {p: f"{n} of {type(m).__name__}" for m in models for n, p in m.named_parameters()}


def _prepare(
    models: Sequence[nn.Module],
    term: SyncTerm,
    context: Callable[[], StepContext],
    options: StepOptions,
) -> list[PreparedModel]:
    """Each with the split terms that are about it; one without experts is whole under ep."""
    strategy = context().strategy
    without_experts = [False] * len(models)
    if strategy.ep is not None:
        from shoal.replica.expert.mixtures import mixtures_of

        have_experts = [bool(mixtures_of(model, strategy.ep.experts)) for model in models]
        without_experts = [any(have_experts) and not has for has in have_experts]
    prepared = []
    for model, tp, is_copy in zip(
        models, tensor_plans(models, strategy.tp), without_experts, strict=True
    ):
        of_model, sync = replace(strategy, tp=tp), term
        if is_copy:
            of_model = replace(of_model, ep=None)
        if isinstance(model, LooseParameters):  # it has no layers
            sync = term.with_whole_parameters()
            of_model = replace(of_model, sync=sync, tp=None)
        made = replace(context(), strategy=of_model)
        prepared.append(prepare_model(model, sync, options, made))
    return prepared


def _build_parts(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[int, str]],
    prepared: list[PreparedModel],
    parts: list[LoopPart],
    context: Callable[[], StepContext],
) -> list[LoopPart]:
    """The parts of one optimizer, each of some parameters of one model; added to `parts`."""
    factory = PartOptimizers(optimizer)
    functions = StepFunctions(_by_the_script, factory)
    first = len(parts)
    for i, model in enumerate(prepared):
        wanted = {name for index, name in names if index == i}
        whole = [(name, p) for name, p in model.shard.named if name in wanted and p.numel()]
        for is_trained in (True, False):  # or frozen at present
            named = [(name, p) for name, p in whole if p.requires_grad is is_trained]
            if not named:
                continue
            is_first = all(part.step.model is not model.model for part in parts)
            of_part = context()
            if parts and of_part.mesh.dp.size > 1:  # gradients of parts come in any order
                mesh = replace(of_part.mesh, dp=of_part.mesh.dp.duplicate())
                of_part = replace(of_part, mesh=mesh)
            shard = copy.copy(model.shard)
            shard.named = named
            of_model = replace(model, shares_statistics=is_first)
            for _, p in named:  # frozen ones get their place in the layout: they may train later
                p.requires_grad_(True)
            step = assemble_step(of_model, shard, functions, of_part)
            for _, p in named:
                p.requires_grad_(is_trained)
            step.saves_model = is_first
            parts.append(LoopPart(step))
    factory.is_building = False
    return parts[first:]


def _take_params(
    optimizer: torch.optim.Optimizer, names: list[tuple[int, str]], models: Sequence[nn.Module]
) -> None:
    """Splitting a model may have replaced its parameters: the optimizer gets the present ones."""
    present = [dict(model.named_parameters()) for model in models]
    source = iter(names)
    for group in optimizer.param_groups:
        for k, old in enumerate(group["params"]):
            i, name = next(source)
            new = present[i][name]
            if new is not old:
                group["params"][k] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


def _by_the_script(*given: Any) -> Any:
    raise BadInput("the script computes the loss, and calls the optimizer, itself")
