"""The sizes of models and optimizers that a script gives to `job.setup`, for `shoal memory`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shoal.observe.model_sizes import sizes_of
from shoal.replica.optimizers import PARAM_KEYS, like
from shoal.sync.memory import ModelSizes
from shoal.sync.optimizer_step import OptimizerFactory


def loop_sizes(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[ModelSizes]:
    """Of every model that an optimizer trains, once for each of them."""
    sizes = []
    for optimizer in optimizers:
        for model in models:
            if not isinstance(optimizer, torch.optim.Optimizer):
                sizes.append(sizes_of(model, optimizer))
                continue
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {n for n, p in model.named_parameters() if id(p) in mine and p.requires_grad}
            if trained:
                sizes.append(sizes_of(model, _factory(optimizer, model), trained))
    return sizes


def other_bytes(models: Sequence[nn.Module], sizes: Sequence[ModelSizes]) -> int:
    """Of the parameters and buffers that no optimizer trains."""
    tensors = {id(t): t for m in models for t in [*m.parameters(), *m.buffers()]}
    known = sum(p.nbytes for size in sizes for p in size.flat.params)
    known += sum(size.untrained for size in sizes)
    return max(0, sum(t.nbytes for t in tensors.values()) - known)


def _factory(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """Makes one like `optimizer` for parameters that stand for those of the model, by name."""
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    of_model = dict(model.named_parameters())

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params: dict[int, list[nn.Parameter]] = {}
        for name, p in named:
            params.setdefault(group_of[id(of_model[name])], []).append(p)
        groups = [
            {**{k: v for k, v in group.items() if k not in PARAM_KEYS}, "params": params[i]}
            for i, group in enumerate(optimizer.param_groups)
            if i in params
        ]
        made: torch.optim.Optimizer = like(optimizer, groups)
        return made

    return make
