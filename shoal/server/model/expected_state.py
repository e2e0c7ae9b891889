"""What an optimizer keeps for each parameter: names, shapes and types of its tensors.

Fused optimizers read and write their state without looking at its size. So the state that comes
from a file or a socket is compared with what a step of the same optimizer makes on the meta device,
where nothing is allocated or computed.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Form(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


Forms = dict[str, Form]
Group = Mapping[str, Any]  # of an optimizer, with its parameters


def expected_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group] | None = None
) -> dict[nn.Parameter, Forms] | None:
    """The tensors that `optimizer` keeps for each parameter once it has made a step.

    `groups` are its parameter groups with other settings. Where a step on the meta device is not
    possible, what it keeps now; None if that is nothing.
    """
    groups = optimizer.param_groups if groups is None else groups
    try:
        return _after_a_step(type(optimizer), optimizer.defaults, groups)
    except Exception:  # of any optimizer that computes with values, or needs its state before
        state = optimizer.state
        return {p: _forms(state[p]) for p in state if isinstance(p, nn.Parameter)} or None


def misfit(key: str, found: Form, p: Tensor, expected: Forms | None) -> str | None:
    """What is wrong with a tensor of the state of parameter `p`; None if it fits."""
    if expected is not None and key in expected:
        wanted = expected[key]
        return None if found == wanted else f"{key} is {found}, and its optimizer needs {wanted}"
    sizes = zip(found.shape, p.shape, strict=False)
    fits = len(found.shape) == p.dim() and all(size in (1, own) for size, own in sizes)
    if not fits and math.prod(found.shape) != 1:
        return f"{key} is {found}, which does not fit {Form.of(p)}"
    if len(found.shape) and found.shape == tuple(p.shape) and p.is_floating_point():
        return None if found.dtype.is_floating_point else f"{key} is {found} for {Form.of(p)}"
    return None


def _after_a_step(
    kind: type[torch.optim.Optimizer], defaults: dict[str, Any], groups: Sequence[Group]
) -> dict[nn.Parameter, Forms]:
    alike: dict[tuple[int, Form], nn.Parameter] = {}  # one copy for all of a group and form
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for i, group in enumerate(groups):
        for p in group["params"]:
            copies[p] = alike.setdefault((i, Form.of(p)), _on_meta(p))
    on_meta = [
        {**_unfused(group), "params": list(dict.fromkeys(copies[p] for p in group["params"]))}
        for group in groups
    ]
    if kind.__module__.startswith("torch.optim."):
        known = inspect.signature(kind).parameters
        settings = {key: value for key, value in _unfused(defaults).items() if key in known}
        probe: Any = kind(on_meta, **settings)
    else:  # its constructor may take anything
        probe = kind.__new__(kind)
        state = {"defaults": defaults, "state": defaultdict(dict), "param_groups": on_meta}
        probe.__setstate__(state)
    probe.step()
    return {p: _forms(probe.state[copy]) for p, copy in copies.items()}


def _unfused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer or group that works on the meta device."""
    plain = {"fused": None, "foreach": False, "capturable": False}
    kept = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
    return {**kept, **{key: value for key, value in plain.items() if key in settings}}


def _on_meta(p: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
    copy.grad = torch.empty_like(copy)
    return copy


def _forms(state: Mapping[str, Any]) -> Forms:
    return {key: Form.of(value) for key, value in state.items() if isinstance(value, Tensor)}
