"""Modules that cannot be trained as they are, refused by name before anything is built."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import BadInput
from shoal.strategy.strategy import Strategy


def check_modules(model: nn.Module, changed_by: Strategy | None) -> None:
    """`changed_by` is the strategy, where it replaces layers or parameters of the model."""
    for name, module in model.named_modules():
        name = name or "the model"
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise BadInput(
                f"{name} is a {type(module).__name__} whose shape is not known yet: call the model "
                "once on an example, before it is trained"
            )
        # what torch.compile or TorchScript has made calls the layers and parameters as they were
        is_script = isinstance(module, torch.jit.ScriptModule)
        if changed_by and (is_script or type(module).__name__ == "OptimizedModule"):
            tool = "torch.jit" if is_script else "torch.compile"
            raise BadInput(
                f"{name} is compiled by {tool}, and {changed_by} changes layers or parameters of a "
                f"model: leave {tool} out, or take ddp, ps or zero(2)"
            )


def hooked_module(model: nn.Module) -> str | None:
    """The first module with a forward hook, of which a loss may use what it stores."""
    return next((name for name, m in model.named_modules() if m._forward_hooks), None)


def refuse_complex(model: nn.Module, strategy: Strategy) -> None:
    for name, p in model.named_parameters():
        if p.is_complex():
            raise BadInput(
                f"{name} is {p.dtype}, and {strategy} does not train complex parameters: take "
                "ddp, zero(1) or zero(2), or keep it as pairs of real numbers and use "
                "torch.view_as_complex in forward"
            )


class KnownParameters:
    """`check` is cheap, so that every step can call it: it compares identities."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.remember()

    def check(self) -> None:
        """Raise `BadInput` if a parameter to train was added or replaced."""
        if all(list(map(id, held.values())) == before for held, before in self._held):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise BadInput(
                    f"{name} was added to {type(self._model).__name__}, or replaced, after "
                    "job.step or job.setup was called, and would not be trained: change the model "
                    "before that; new values of a parameter are copied into it, under "
                    "torch.no_grad()"
                )
        self.remember()

    def remember(self) -> None:
        """What each module holds now; the objects are kept, so that no other gets their id."""
        self._known = {id(p): p for p in self._model.parameters()}
        modules = list(self._model.modules())
        holders = [held for m in modules for held in (m._parameters, m._modules)]
        self._held = [(held, [id(value) for value in held.values()]) for held in holders]
        self._objects = [list(held.values()) for held in holders]
