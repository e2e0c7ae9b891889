"""What `job.setup` does: models and optimizers become parts, each with its own sync.

    part = parameters of one model that one optimizer updates, either trained or frozen at the start

A frozen part costs no communication until it is trained. Parts of one model share its shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.embedding.module import Embedding
from shoal.errors import BadInput, NotBuilt
from shoal.replica.expert.mixtures import mixtures_of
from shoal.strategy.base import SyncTerm
from shoal.strategy.split_terms import Tp
from shoal.train.build_step import assemble_step, broadcast_start
from shoal.train.earlier_setups import EarlierSetups
from shoal.train.loop_optimizer import PartOptimizers, params_of
from shoal.train.loop_part import LoopPart
from shoal.train.options import StepFunctions, StepOptions
from shoal.train.prepare_model import PreparedModel, prepare_model
from shoal.train.step_context import StepContext
from shoal.train.tensor_plans import tensor_plans

Named = list[tuple[str, nn.Parameter]]


class LooseParameters(nn.Module):
    """Parameters of an optimizer that are in no model, such as a temperature."""

    def __init__(self, params: Sequence[nn.Parameter]):
        super().__init__()
        for i, p in enumerate(params):
            self.register_parameter(str(i), p)


@dataclass(frozen=True)
class LoopFunctions(StepFunctions):
    """The script computes the loss and calls the optimizer."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        return None  # LBFGS may be used


@dataclass(frozen=True)
class LoopSetup:
    """What `set_up` has made of models and optimizers."""

    prepared: list[PreparedModel]  # of models that were not known before
    parts_of: list[list[LoopPart]]  # of each optimizer
    new_parts: list[LoopPart]
    optimizers: list[torch.optim.Optimizer]


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
    earlier: EarlierSetups,
) -> LoopSetup:
    """All ranks call it together. What it makes is added to `earlier`."""
    term = loop_term(context())
    _check_models(models)
    made = _make_optimizers(models, optimizers)
    known = [prepared.model for prepared in earlier.prepared]
    models = earlier.new_among(models)
    for optimizer in made:
        earlier.give_present(optimizer)
    models = [*models, *_loose_models([*known, *models], made)]
    names = [_names_of(optimizer, [*known, *models]) for optimizer in made]
    before = [dict(model.named_parameters()) for model in models]
    ep = context().strategy.ep
    have_experts = [ep is not None and bool(mixtures_of(model, ep.experts)) for model in models]
    tps = tensor_plans(models, [isinstance(m, LooseParameters) for m in models], context())
    prepared = [
        _prepared(
            model,
            term,
            _with_tp(context(), tp, term),
            is_copy=any(have_experts) and not has_experts,
        )
        for model, has_experts, tp in zip(models, have_experts, tps, strict=True)
    ]
    for optimizer, of_optimizer in zip(made, names, strict=True):
        _take_params(optimizer, of_optimizer, [*known, *models])
    for of_model, params in zip(prepared, before, strict=True):
        earlier.add(of_model, params)
    first = len(earlier.parts)
    parts_of = []
    for optimizer, of_optimizer in zip(made, names, strict=True):
        builder = _PartBuilder(PartOptimizers(optimizer), context, earlier)
        parts_of.append(builder.build(of_optimizer))
    trained = [p for part in earlier.parts for p in part.params]
    for model in models:
        broadcast_start(model, trained, context().mesh.dp)
    return LoopSetup(prepared, parts_of, earlier.parts[first:], made)


def _with_tp(context: StepContext, tp: Tp | None, term: SyncTerm) -> StepContext:
    sync = term if tp is None else context.strategy.sync
    return replace(context, strategy=replace(context.strategy, tp=tp, sync=sync))


def _prepared(
    model: nn.Module, term: SyncTerm, context: StepContext, is_copy: bool
) -> PreparedModel:
    """`is_copy`: it has no experts and stands beside a model that has some."""
    if is_copy:
        context = replace(context, strategy=replace(context.strategy, ep=None))
    if isinstance(model, LooseParameters):
        term = term.with_whole_parameters()
        strategy = replace(context.strategy, sync=term, tp=None)  # it has no layers
        context = replace(context, strategy=strategy)
    return prepare_model(model, term, StepOptions(), context, _no_optimizer)


class _PartBuilder:
    """Builds the parts of one optimizer."""

    def __init__(
        self, factory: PartOptimizers, context: Callable[[], StepContext], earlier: EarlierSetups
    ):
        self._factory = factory
        self._context = context
        self._earlier = earlier

    def build(self, names: list[tuple[int, str]]) -> list[LoopPart]:
        """Parts that are there already, and new ones, which are added to the earlier ones."""
        parts: list[LoopPart] = []
        for i, model in enumerate(self._earlier.prepared):
            wanted = {name for index, name in names if index == i}
            taken = self._earlier.take_over(model.model, self._factory, self._context())
            has_part = {id(p) for part in taken for p in part.params}
            named = [(name, p) for name, p in model.shard.named if name in wanted and p.numel()]
            new = [(name, p) for name, p in named if id(p) not in has_part]
            parts += taken
            for some in _divided(new):
                parts.append(self._part(model, some))
                self._earlier.parts.append(parts[-1])
        self._factory.is_building = False
        if not parts:
            raise BadInput("an optimizer of job.setup has no parameter of its models")
        return parts

    def _part(self, model: PreparedModel, named: Named) -> LoopPart:
        context = self._context()
        is_first = all(part.step.model is not model.model for part in self._earlier.parts)
        if self._earlier.parts and context.mesh.dp.size > 1:  # gradients of parts come in any order
            mesh = replace(context.mesh, dp=context.mesh.dp.duplicate())
            context = replace(context, mesh=mesh)
        shard = copy.copy(model.shard)
        shard.named = named
        functions = LoopFunctions(_no_loss, self._factory)
        with _all_trained([p for _, p in named]):
            step = assemble_step(
                replace(model, shares_statistics=is_first), shard, functions, context
            )
        return LoopPart(step)


def _divided(named: Named) -> list[Named]:
    """Trained parameters, and those that are frozen at present."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    frozen = [(name, p) for name, p in named if not p.requires_grad]
    return [some for some in (trained, frozen) if some]


def _check_models(models: Sequence[nn.Module]) -> None:
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, Embedding):
                raise NotBuilt(
                    f"shoal.Embedding ({name or 'the model'}) trains by job.step, not by "
                    "job.setup: use nn.Embedding"
                )


def _make_optimizers(
    models: Sequence[nn.Module], optimizers: Sequence[Any]
) -> list[torch.optim.Optimizer]:
    """Factories are called with the (name, parameter) pairs of all models."""
    factories = [o for o in optimizers if not isinstance(o, torch.optim.Optimizer)]
    if factories and len(optimizers) > 1:
        raise BadInput(
            "of several optimizers job.setup cannot tell which parameters a factory is for: pass "
            "torch.optim instances"
        )
    made = []
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(_pairs_of(models))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadInput(
                "job.setup takes models (nn.Module) and optimizers: torch.optim instances, or one "
                "function from (name, parameter) pairs to an optimizer"
            )
        made.append(optimizer)
    return made


def _pairs_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for i, model in enumerate(models):
        for name, p in model.named_parameters():
            yield (name if len(models) == 1 else f"{i}.{name}"), p


def _loose_models(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Module]:
    known = {id(p) for model in models for p in model.parameters()}
    loose = [p for o in optimizers for p in params_of(o) if id(p) not in known]
    for p in loose:
        if not isinstance(p, nn.Parameter):
            raise BadInput(
                f"an optimizer of job.setup updates a tensor of shape {tuple(p.shape)} that is in "
                "none of its models: make it an nn.Parameter, and pass its module"
            )
    return [LooseParameters(loose)] if loose else []


def _names_of(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
) -> list[tuple[int, str]]:
    """The model and name of every parameter, in the order of the optimizer."""
    names = {
        id(p): (i, name) for i, model in enumerate(models) for name, p in model.named_parameters()
    }
    return [names[id(p)] for p in params_of(optimizer)]


def _take_params(
    optimizer: torch.optim.Optimizer, names: list[tuple[int, str]], models: Sequence[nn.Module]
) -> None:
    """Splitting a model may have replaced its parameters: the optimizer gets the present ones."""
    present = [dict(model.named_parameters()) for model in models]
    source = iter(names)
    for group in optimizer.param_groups:
        for k, old in enumerate(group["params"]):
            i, name = next(source)
            new = present[i].get(name)
            if new is None:
                raise BadInput(f"the strategy has no parameter {name!r} in place of the model's")
            if new is not old:
                group["params"][k] = new
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)


@contextmanager
def _all_trained(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Frozen parameters get their place in the layout, too: they may be trained later."""
    before = [p.requires_grad for p in params]
    for p in params:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p, requires_grad in zip(params, before, strict=True):
            p.requires_grad_(requires_grad)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise BadInput("the script computes the loss itself")


def _no_optimizer(named: Any) -> torch.optim.Optimizer:
    raise BadInput("the script calls the optimizer itself")
