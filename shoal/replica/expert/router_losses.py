"""Auxiliary load-balancing losses of transformers' routers, over the global batch.

`load_balancing_loss_func(router logits, …)` multiplies means over tokens, so the mean of its values
on two halves of a batch is not its value on the batch. Where workers have other rows, it is given
the router logits of all of them: one all-gather per layer of `tokens · experts` numbers, and a
reduce-scatter in backward. It is called by its name in the module of the model's class, where it
is replaced once; a context variable says which workers the model that runs now belongs to.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.batchnorm import ForwardState
from shoal.replica.split.mapping import gather_rows
from shoal.runtime.pytree import map_tensors

_NAME = "load_balancing_loss_func"
_MASK = "attention_mask"
Arguments = dict[str, Any]
Prepare = Callable[[Arguments], Arguments]
_prepare: ContextVar[Prepare | None] = ContextVar("_prepare", default=None)


def has_router_losses(model: nn.Module) -> bool:
    return bool(_modules_with_losses(model))


def share_router_losses(model: nn.Module, group: Group, state: ForwardState) -> None:
    """Let router losses of this model use the tokens of all ranks of `group`."""
    from shoal.replica.split.sharded_tensor import full_tensors

    def gather(rows: Tensor) -> Tensor:
        return gather_rows(rows if state.rows_are_real else rows[:0], group)

    def prepare(arguments: Arguments) -> Arguments:
        mask = arguments.get(_MASK)
        if isinstance(mask, Tensor):  # its rows become tokens, as those of router logits are
            arguments[_MASK] = mask.reshape(-1, 1)
        gathered: Arguments = map_tensors(gather, full_tensors(arguments))
        return gathered

    if group.size > 1:
        _use(model, prepare)


def refuse_router_losses(model: nn.Module) -> None:
    """`BadInput` where a pipelined model computes one: at once, or when it does."""

    def refuse(arguments: Arguments) -> Arguments:
        raise BadInput(
            f"the load-balancing loss of {type(model).__name__} needs the router logits of all "
            "layers, and under pp they are on different stages: set output_router_logits=False, "
            "or omit pp"
        )

    if has_router_losses(model):
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            refuse({})
        _use(model, refuse)


def _use(model: nn.Module, prepare: Prepare) -> None:
    """While this model runs, router losses get what `prepare` makes of their arguments."""
    for module in _modules_with_losses(model):
        function = getattr(module, _NAME)
        if not hasattr(function, "is_prepared"):
            setattr(module, _NAME, _prepared(function))

    def enter(used: Prepare | None, *_: Any) -> None:
        _prepare.set(used)

    model.register_forward_pre_hook(partial(enter, prepare))
    model.register_forward_hook(partial(enter, None), always_call=True)


def _modules_with_losses(model: nn.Module) -> list[Any]:
    """The Python modules that define a class of the model and such a function."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in modules if callable(getattr(module, _NAME, None))]


def _prepared(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        prepare = _prepare.get()
        if prepare is None:
            return function(*args, **kwargs)
        return function(**prepare(dict(signature.bind(*args, **kwargs).arguments)))

    call.is_prepared = True  # type: ignore[attr-defined]
    return call
