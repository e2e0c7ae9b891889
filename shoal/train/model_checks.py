"""Modules that cannot be trained as they are, refused by name before anything is built."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import BadInput
from shoal.strategy.strategy import Strategy


def check_modules(model: nn.Module, changed_by: Strategy | None) -> None:
    """`changed_by` is the strategy, where it replaces layers or parameters of the model."""
    for name, module in model.named_modules():
        _check_lazy(name or "the model", module)
        if changed_by is not None:
            _check_compiled(name or "the model", module, changed_by)


def _check_lazy(name: str, module: nn.Module) -> None:
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
        raise BadInput(
            f"{name} is a {type(module).__name__} whose shape is not known yet: call the model "
            "once on an example, before it is trained"
        )


def _check_compiled(name: str, module: nn.Module, strategy: Strategy) -> None:
    """What torch.compile or TorchScript has made calls the layers and parameters as they were."""
    if type(module).__name__ == "OptimizedModule":
        tool = "torch.compile"
    elif isinstance(module, torch.jit.ScriptModule):
        tool = "torch.jit"
    else:
        return
    raise BadInput(
        f"{name} is compiled by {tool}, and {strategy} changes layers or parameters of a model: "
        f"leave {tool} out, or take ddp, ps or zero(2)"
    )
