"""Optimizers of torch.optim by name, which a worker may ask a server to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from shoal.errors import BadInput
from shoal.replica.optimizers import ELEMENTWISE

Option = bool | int | float | None | tuple[float, ...]
# LBFGS evaluates the loss, SparseAdam needs sparse gradients
_UNSUPPORTED = ("Optimizer", "LBFGS", "SparseAdam")


class ParameterGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter group: which parameters, by their number in the model, and its options."""

    parameters: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    options: Annotated[dict[str, Option], msgspec.Meta(max_length=64)]


class NamedOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of torch.optim, its options and parameter groups; no groups: one of all."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    options: Annotated[dict[str, Option], msgspec.Meta(max_length=64)]
    groups: tuple[ParameterGroup, ...] = ()

    @property
    def is_elementwise(self) -> bool:
        return self.name in ELEMENTWISE

    def make(self, params: Sequence[nn.Parameter], numbers: Sequence[int]) -> torch.optim.Optimizer:
        """The optimizer of these parameters of the model; BadInput if it has no such options."""
        known = classes()
        if self.name not in known:
            raise BadInput(f"torch.optim has no optimizer {self.name!r} that a server can run")
        kind: Callable[..., torch.optim.Optimizer] = known[self.name]
        try:
            return kind(self._groups(params, numbers), **self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"torch.optim.{self.name} refuses its options: {error}") from error

    def _groups(self, params: Sequence[nn.Parameter], numbers: Sequence[int]) -> list[Any]:
        if not self.groups:
            return list(params)
        group_of = {n: i for i, group in enumerate(self.groups) for n in group.parameters}
        groups: list[dict[str, Any]] = [{**group.options, "params": []} for group in self.groups]
        for p, number in zip(params, numbers, strict=True):
            if number not in group_of:
                raise BadInput(f"parameter {number} is in no group of the optimizer")
            groups[group_of[number]]["params"].append(p)
        return groups


@functools.cache
def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim that works on dense gradients in one pass."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ == name
        and name not in _UNSUPPORTED
    }


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The step alone: what torch does around it for profilers and hooks takes as long for 1 MB."""
    step = type(optimizer).step
    plain: Callable[..., object] | None = getattr(step, "__wrapped__", None)
    if plain is None or not getattr(step, "hooked", False):
        return optimizer.step
    return functools.partial(plain, optimizer)


def name_of(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> NamedOptimizer:
    """This optimizer of a worker by name; BadInput if a server cannot run it."""
    name = type(optimizer).__name__
    if classes().get(name) is not type(optimizer):
        raise BadInput(
            f"the servers run the optimizer, and {name} is not a class of torch.optim that they "
            'can run: use one of these, or ps(update="worker")'
        )
    number = {id(p): i for i, p in enumerate(params)}
    for group in (optimizer.defaults, *optimizer.param_groups):
        for key, value in group.items():
            if key in optimizer.defaults and not _is_plain(value):
                raise BadInput(
                    f"{name}({key}=…) is not a plain number, and the servers run the optimizer: "
                    'give it as a number, or use ps(update="worker")'
                )
    groups = tuple(
        ParameterGroup(tuple(number[id(p)] for p in group["params"]), options_of(optimizer, group))
        for group in optimizer.param_groups
    )
    return NamedOptimizer(name, options_of(optimizer, optimizer.defaults), groups)


def options_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Option]:
    """The options of a group that its class is made with and that have plain values."""
    made_with = inspect.signature(type(optimizer)).parameters
    return {
        key: tuple(map(float, value)) if isinstance(value, (tuple, list)) else value
        for key, value in group.items()
        if key in made_with and key != "params" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (bool, int, float))
