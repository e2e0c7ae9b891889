"""A copy of a model's modules that shares their parameters and buffers."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.replica.batchnorm_call import OwnForward


def copy_structure(module: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """What is set on a module, or replaced in it, leaves its copy as it is."""
    copies = {} if copies is None else copies
    if id(module) in copies:
        return copies[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        return module
    twin: nn.Module = object.__new__(type(module))
    copies[id(module)] = twin
    for name, value in vars(module).items():
        twin.__dict__[name] = _own(value, module, twin)
    twin.__dict__["_modules"] = {
        name: None if child is None else copy_structure(child, copies)
        for name, child in module._modules.items()
    }
    return twin


def _own(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        return copy.copy(value)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if isinstance(value, OwnForward) and value.layer is module:
        own = _own(value.own_forward, module, twin)
        shared = copy_structure(cast(nn.Module, value.shared))
        return OwnForward(cast(_BatchNorm, twin), shared, own)
    return value
