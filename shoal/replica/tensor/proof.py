"""Proof before the first step: a split model computes what the model does.

The whole model and the split one run on the first micro-batch, without dropout. Outputs, outputs
of every layer behind which ranks add up, and gradients of all parameters are compared. What was
found by names and shapes was a guess until then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from shoal.comm.group import Op
from shoal.errors import BadInput, ShoalError
from shoal.pytree import tensors_of
from shoal.replica.comparison import gradients_of, is_close, largest_of
from shoal.replica.microbatch import (
    Quiet,
    evaluate_leaves,
    fork_rng,
    preserve_modes,
    seed_generators,
)
from shoal.replica.tensor.activations.sharded_tensor import full_tensors
from shoal.replica.tensor.layers.linear import ColumnLinear, RowLinear
from shoal.replica.tensor.parallelize import TensorSplit

LARGEST_PROVEN_BYTES = 1 << 30  # of the parameters; above, the split is compared in its blocks
_NOISE = 1e-5  # of the largest gradient: what rounding leaves where the gradient is 0


class _Computed(NamedTuple):
    outputs: list[Tensor]
    sums: dict[str, Tensor]  # outputs of layers behind which ranks add up, as they ran
    gradients: dict[str, Tensor | None]


def prove_call(
    split: TensorSplit,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    with_gradients: bool,
) -> None:
    """Raise `BadInput` on all ranks unless the split model computes what the model does."""
    call = _Call(args, kwargs, seed)
    try:
        _compare_all(split, call, with_gradients, nn.Module.eval)
    except _FailsInEvaluation:
        _compare_all(split, call, with_gradients, evaluate_leaves)


class _FailsInEvaluation(Exception):
    """The model itself does, such as one that returns losses in training alone."""


def _compare_all(split: TensorSplit, call: _Call, with_gradients: bool, quiet: Quiet) -> None:
    model = split.model
    with fork_rng(split.device), preserve_modes(model), preserve_modes(split.original):
        quiet(model)
        quiet(split.original)
        for name, inner in _calls(split, call.args, call.kwargs, call.seed):
            _compare(split, name, inner, with_gradients)


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int


def _calls(
    split: TensorSplit, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> list[tuple[str, _Call]]:
    """The modules that are compared, and how they are called: all, or blocks of a large model."""
    if split.full_bytes() <= LARGEST_PROVEN_BYTES:
        return [("", _Call(args, kwargs, seed))]
    calls: dict[str, _Call] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, named: Any) -> None:
            inputs, by_name = _detached((full_tensors(given), full_tensors(named)))
            calls.setdefault(name, _Call(inputs, by_name, seed))

        return hook

    modules = dict(split.model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(note(name), with_kwargs=True)
        for name in split.typical_blocks()
    ]
    try:
        with torch.no_grad():
            seed_generators(split.device, seed)
            split.model(*args, **kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    return list(calls.items())


def _detached(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    if type(tree) in (tuple, list):
        return type(tree)(_detached(item) for item in tree)
    if type(tree) is dict:
        return {key: _detached(value) for key, value in tree.items()}
    return tree


def _compare(split: TensorSplit, name: str, call: _Call, with_gradients: bool) -> None:
    whole = split.original.get_submodule(name)
    part = split.model.get_submodule(name)
    local = dict(part.named_parameters())
    full = split.gather_full({f"{name}.{n}" if name else n: p.detach() for n, p in local.items()})
    leaves = {
        n: full[f"{name}.{n}" if name else n].clone().requires_grad_(p.requires_grad)
        for n, p in local.items()
    }
    kept = split.gather_full({f"{name}.{n}" if name else n: b for n, b in part.named_buffers()})
    buffers = {n: kept[f"{name}.{n}" if name else n].clone() for n, _ in part.named_buffers()}
    rows = [n[len(name) + 1 :] if name else n for n in split.sums_in(name)]

    def run_whole(*args: Any, **kwargs: Any) -> Any:
        return functional_call(whole, {**leaves, **buffers}, args, kwargs)

    try:
        expected = _compute(split, whole, run_whole, leaves, rows, call, with_gradients)
    except Exception as error:  # whatever a forward does in evaluation mode
        if whole.training or isinstance(error, (ShoalError, torch.OutOfMemoryError)):
            raise
        raise _FailsInEvaluation from error
    ran: list[str] = []
    order: list[str] = []
    hooks = _note_linear_layers(part, order)
    try:
        actual = _compute(split, part, part, local, rows, call, with_gradients, ran)
    except (ShoalError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        stuck = next((row for row in expected.sums if row not in ran), "")
        stuck = _open_column(part, order) or stuck
        raise _refusal(split, name, stuck, f"fails with {type(error).__name__}: {error}") from error
    finally:
        for handle in hooks:
            handle.remove()
    _check(split, name, expected, actual)


def _note_linear_layers(part: nn.Module, order: list[str]) -> list[RemovableHandle]:
    """Their names go to `order` as they run."""

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, output: order.append(name)

    return [
        module.register_forward_hook(note(name))
        for name, module in part.named_modules()
        if isinstance(module, ColumnLinear | RowLinear)
    ]


def _open_column(part: nn.Module, order: list[str]) -> str | None:
    """A layer of whose features each rank has some, if its row layer was not reached."""
    latest = part.get_submodule(order[-1]) if order else None
    is_open = isinstance(latest, ColumnLinear) and latest.output == "sharded"
    return order[-1] if is_open else None


def _compute(
    split: TensorSplit,
    module: nn.Module,
    function: Callable[..., Any],
    parameters: dict[str, Any],
    rows: list[str],
    call: _Call,
    with_gradients: bool,
    ran: list[str] | None = None,
) -> _Computed:
    sums: dict[str, Tensor] = {}
    noted = [] if ran is None else ran

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = tensors_of(full_tensors(output))[:1]
            if found and name not in sums:
                sums[name] = found[0].detach()
                noted.append(name)

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(note(name)) for name in rows]
    seed_generators(split.device, call.seed)
    try:
        with torch.set_grad_enabled(with_gradients):
            outputs = tensors_of(full_tensors(function(*call.args, **call.kwargs)))
    finally:
        for handle in hooks:
            handle.remove()
    gradients = gradients_of(outputs, parameters) if with_gradients else {}
    return _Computed([t.detach() for t in outputs], sums, gradients)


# ------------------------------------------------------------------ comparing


def _check(split: TensorSplit, name: str, expected: _Computed, actual: _Computed) -> None:
    """The first difference that any rank finds is named on all of them."""
    found: dict[str, bool] = {}
    for row, value in expected.sums.items():
        if row in actual.sums:
            found[row] = is_close(value, actual.sums[row])
    shapes = [t.shape for t in actual.outputs] == [t.shape for t in expected.outputs]
    outputs = zip(expected.outputs, actual.outputs, strict=False)
    if name:  # of a block the first one: others may be those of some heads
        found[""] = all(is_close(a, b) for a, b in list(outputs)[:1])
    else:
        found[""] = shapes and all(is_close(a, b) for a, b in outputs)
    found.update(_close_gradients(split, name, expected, actual))
    flags = torch.tensor([float(ok) for ok in found.values()], device=split.device)
    split.group.all_reduce(flags, Op.MIN).wait()
    for key, ok in zip(found, flags.tolist(), strict=True):
        if not ok:
            raise _refusal(split, name, key, "does not compute what the model does")


def _close_gradients(
    split: TensorSplit, name: str, expected: _Computed, actual: _Computed
) -> dict[str, bool]:
    largest = max(
        (largest_of(g) for g in expected.gradients.values() if g is not None), default=0.0
    )
    return {
        key: is_close(
            split.shard_of(f"{name}.{key}" if name else key, _or_zero(grad, actual.gradients[key])),
            _or_zero(actual.gradients[key], grad),
            _NOISE * largest,
        )
        for key, grad in expected.gradients.items()
        if key in actual.gradients and not (grad is None and actual.gradients[key] is None)
    }


def _or_zero(gradient: Tensor | None, other: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    assert other is not None
    return torch.zeros_like(other)


def _refusal(split: TensorSplit, block: str, where: str, what: str) -> BadInput:
    name = ".".join(part for part in (block, where) if part)
    parent = name.rpartition(".")[0] or name
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", parent)
    place = f"{name} and the layers around it are split" if name else "its layers are split"
    return BadInput(
        f"tp({split.group.size}) cannot train {type(split.model).__name__}: where {place}, it "
        f'{what}; keep what is special about it whole, as in plan={{"{pattern}": "whole"}}'
    )
