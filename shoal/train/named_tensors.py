"""A model as tensors by name, and back. Names are those of the model's `state_dict`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError
from shoal.replica.state_dicts import state_of


def model_tensors(
    model: nn.Module, without: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """CPU copies of the model's tensors on this rank, and the names that are tied to another."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, value in state_of(model).items():
        if not isinstance(value, Tensor) or value.device.type == "meta":
            continue  # another worker holds it
        key = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        if name not in without:
            tensors[name] = on_cpu(value)
    return tensors, tied


def fit_model(
    model: nn.Module, tensors: dict[str, Tensor], tied: Any, where: Path
) -> dict[str, Tensor]:
    """A tensor for each one of the model, tied ones included; those of another model are an error.

    Changes nothing.
    """
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise CheckpointError(f"the checkpoint at {where} is damaged: 'tied' is not a table")
    if twice := sorted(set(tied) & set(tensors)):
        raise CheckpointError(f"the checkpoint at {where} is damaged: {twice[0]!r} is there twice")
    complete = {**tensors, **{name: tensors[t] for name, t in tied.items() if t in tensors}}
    targets = {n: t for n, t in state_of(model).items() if isinstance(t, Tensor)}
    for name, tensor in targets.items():
        if name not in complete:
            raise _another_model(where, f"it has no tensor {name!r}")
        _check_tensor(name, complete[name], tensor, where)
    extra = sorted(set(complete) - set(targets))
    if extra:
        raise _another_model(where, f"this one has no tensor {extra[0]!r}")
    return complete


def copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy what `fit_model` returned into the model."""
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            if isinstance(tensor, Tensor) and not _is_elsewhere(tensor):
                tensor.copy_(tensors[name])


def _check_tensor(name: str, saved: Tensor, tensor: Tensor, where: Path) -> None:
    if saved.shape != tensor.shape:
        shapes = f"{tuple(saved.shape)} there and {tuple(tensor.shape)} here"
        raise _another_model(where, f"{name} is {shapes}")
    if saved.dtype != tensor.dtype:
        raise _another_model(where, f"{name} is {saved.dtype} there and {tensor.dtype} here")


def _another_model(where: Path, sentence: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint at {where} is of another model: {sentence}")


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether another rank holds it: here it has a shape and no memory."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()
