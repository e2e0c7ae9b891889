"""Random numbers of a model's forward, which depend on the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.replica.tensor.layers.attention import ParallelAttention

_CONFIGURED = ("drop", "jitter")  # in names of rates: attention_dropout, layerdrop, jitter_noise


def switch_off_dropout(model: nn.Module) -> list[str]:
    """Unless exact, masks depend on the number of workers and would hide other differences.

    Rates of functional dropout are attributes of modules, or of what they call their `config`.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            names.append(name)
        if isinstance(module, nn.MultiheadAttention | ParallelAttention) and module.dropout > 0:
            module.dropout = 0.0
            names.append(name)
        for owner in (module, getattr(module, "config", None)):
            for key in _rates(owner):
                setattr(owner, key, 0.0)
                names.append(f"{name}.{key}" if name else key)
    return names


def _rates(owner: Any) -> list[str]:
    return [
        key
        for key, value in getattr(owner, "__dict__", {}).items()
        if type(value) is float and value > 0 and any(word in key for word in _CONFIGURED)
    ]


class DrawWatch:
    """Notes the first module whose forward draws random numbers from torch's global generator."""

    def __init__(self, model: nn.Module):
        self.module: str | None = None
        self._states: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name))
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any) -> None:
            if self.module is None:
                self._states[name] = torch.get_rng_state()

        return note

    def _after(self, name: str) -> Callable[..., None]:
        """Modules end inside out, so the first one is the innermost."""

        def compare(module: nn.Module, args: Any, outputs: Any) -> None:
            before = self._states.pop(name, None)
            if self.module is not None or before is None:
                return
            if not torch.equal(before, torch.get_rng_state()):
                kind = type(module).__name__
                self.module = f"{name} ({kind})" if name else kind

        return compare
