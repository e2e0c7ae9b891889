"""A guess is tried on shapes alone: an attention with some of its heads, on the meta device.

An attention that takes the width of its input for that of its heads, or reads the weights of its
layers, cannot run with some of them. It then stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.pytree import tensors_of
from shoal.replica.attributes import attributes_kept
from shoal.replica.tensor.layers.linear_like import LinearLike
from shoal.replica.tensor.planning.roles import Role
from shoal.replica.tensor.structure import copy_structure

_LEADING = ((2, 3), (2, 4, 4), (2, 2, 4, 4))  # (batch, time), (batch, height, width), videos


def can_run(
    module: nn.Module, layers: Mapping[str, LinearLike], roles: Mapping[str, Role], ranks: int
) -> bool:
    """False if the module runs on an input alone, and its share on one rank does not.

    `layers` are its linear layers that have a role, by their name in it; `roles` has them and ""
    for the module itself.
    """
    inputs = next(iter(layers.values())).inputs
    for leading in _LEADING:
        x = torch.empty(*leading, inputs, device="meta")
        expected = _shape(module, x)
        if expected is not None:
            found = _shape(_share(module, layers, roles, ranks), x)
            has_row = any(roles[name].kind == "row" for name in layers)
            return found == expected if has_row else found is not None
    return True


def _share(
    module: nn.Module, layers: Mapping[str, LinearLike], roles: Mapping[str, Role], ranks: int
) -> nn.Module:
    """What rank 0 has, with layers of its own sizes; values do not matter."""
    share = copy_structure(module)
    heads = roles[""].heads
    if heads is not None:
        heads.set_local_counts(share, 0)
    for name, linear in layers.items():
        is_row = roles[name].kind == "row"
        local = roles[name].spec(linear.inputs if is_row else linear.outputs, ranks).length(0)
        sizes = (local, linear.outputs) if is_row else (linear.inputs, local)
        original: Any = module.get_submodule(name)
        layer = nn.Linear(*sizes, bias=original.bias is not None, device="meta")
        parent, _, key = name.rpartition(".")
        share.get_submodule(parent)._modules[key] = layer
    return share


@torch.no_grad()
def _shape(module: nn.Module, x: Tensor) -> torch.Size | None:
    """Of the first output; None if it does not run."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    values = {name: torch.empty_like(t, device="meta") for name, t in tensors}
    try:
        with attributes_kept(module):
            outputs = tensors_of(functional_call(module, values, (x,)))
    except Exception:  # of any kind: it is the module's own code
        return None
    return outputs[0].shape if outputs else None
