"""Attentions whose heads can be split, found by a forward on the meta device.

A module has layers for queries, keys and values (one for all, or several), and one for its output.
That one of them can be split by heads is tried: with activations that know how they are sharded,
nothing in between has to be gathered, and what arrives at the output layer is sharded by heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.replica.attributes import attributes_kept
from shoal.replica.deferred_init import full_name
from shoal.replica.tensor.activations.channel_tensor import ChannelShardedTensor
from shoal.replica.tensor.activations.spec_views import merged
from shoal.replica.tensor.layers.channels import ChannelRole, Channels, SplitChannels
from shoal.replica.tensor.planning.channel_layers import is_matrix_layer
from shoal.replica.tensor.rng import TensorParallelRng

_LENGTHS = (8, 16)
_MOST_LENGTHS = 8


class Attentions(NamedTuple):
    roles: dict[str, ChannelRole]  # of layers, by name
    not_called: set[str]  # layers whose weights are used without calling them


def find_attentions(model: nn.Module, ranks: int, may_split: Callable[[str], bool]) -> Attentions:
    roles: dict[str, ChannelRole] = {}
    not_called: set[str] = set()
    for name, module in model.named_modules():
        layers = {
            key: child
            for key, child in module.named_children()
            if isinstance(child, nn.Linear)
            and is_matrix_layer(child)
            and may_split(full_name(name, key))
        }
        if len(layers) > 1 and _counts(module):
            found = _split_of(module, layers, ranks)
            roles |= {full_name(name, key): role for key, role in found.roles.items()}
            not_called |= {full_name(name, key) for key in found.not_called}
    return Attentions(roles, not_called)


def _split_of(module: nn.Module, layers: dict[str, nn.Linear], ranks: int) -> Attentions:
    """The first split by heads that computes; none if there is no such."""
    row, width = list(layers.items())[-1][0], list(layers.values())[-1].in_features
    columns = {key: layer for key, layer in layers.items() if key != row}
    if any(layer.out_features % width for layer in columns.values()):
        return Attentions({}, set())
    blocks = sum(layer.out_features // width for layer in columns.values())
    example = _example(module, next(iter(columns.values())).in_features) if blocks == 3 else None
    if example is None:
        return Attentions({}, set())
    not_called = _not_called(module, layers, example)
    if not_called:
        return Attentions({}, not_called)
    for heads in _counts(module):
        if heads < ranks or width % heads:
            continue
        roles = {row: ChannelRole(inputs=Channels((width,), heads))}
        for key, layer in columns.items():
            sizes = (width,) * (layer.out_features // width)
            roles[key] = ChannelRole(outputs=Channels(sizes, heads))
        if _computes(module, layers, roles, row, example, ranks):
            return Attentions(roles, set())
    return Attentions({}, set())


def _not_called(module: nn.Module, layers: dict[str, nn.Linear], example: Tensor) -> set[str]:
    called: set[nn.Module] = set()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer))
        for layer in layers.values()
    ]
    _call(module, _meta_tensors(module), example)
    for hook in hooks:
        hook.remove()
    return {key for key, layer in layers.items() if layer not in called}


def _counts(module: nn.Module) -> list[int]:
    """Numbers that a module keeps: how many heads it has may be one of them; likely ones first."""
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 1
    }
    return list(dict.fromkeys(found[n] for n in sorted(found, key=lambda n: "head" not in n)))


def _example(module: nn.Module, features: int) -> Tensor | None:
    """An input that the module takes."""
    for shape in _shapes(module, features):
        x = torch.empty(shape, device="meta")
        try:
            _call(module, _meta_tensors(module), x)
        except Exception:  # another shape
            continue
        return x
    return None


def _shapes(module: nn.Module, features: int) -> Iterator[tuple[int, ...]]:
    """(batch, time, features), and images with features last."""
    for length in _lengths(module):
        yield 2, length, features
    side = 2 * max((math.isqrt(n) for n in _lengths(module)), default=4)
    yield 2, side, side, features
    for length in _lengths(module):
        yield 2, 2, length, features


def _lengths(module: nn.Module) -> list[int]:
    """Numbers of positions to try: any, or those of a window that the module keeps."""
    numbers: list[int] = []
    kept = [value for inner in module.modules() for value in vars(inner).values()]
    for value in kept:
        if isinstance(value, (tuple, list)) and value and all(isinstance(n, int) for n in value):
            numbers.append(math.prod(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers += [value, value * value]
    likely = [n for n in dict.fromkeys(numbers) if 1 < n <= 1024]
    return [*_LENGTHS, *likely[:_MOST_LENGTHS]]


def _computes(
    module: nn.Module,
    layers: dict[str, nn.Linear],
    roles: dict[str, ChannelRole],
    row: str,
    example: Tensor,
    ranks: int,
) -> bool:
    group: Any = _Simulated(ranks)
    tensors = _meta_tensors(module)
    arrived: list[bool] = []
    expected = roles[row].inputs
    assert expected is not None

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        spec = merged(expected.spec(args[0].dim() - 1, ranks))
        arrived.append(isinstance(args[0], ChannelShardedTensor) and args[0].spec == spec)

    splits = []
    handle = layers[row].register_forward_pre_hook(check)
    try:
        for key, role in roles.items():
            split = SplitChannels(layers[key], role, group, _NoRng(0, False))
            splits.append(split)
            split.attach()
            for name, spec in split.specs.items():
                tensor = tensors[f"{key}.{name}"]
                shape = spec.shard_shape(tensor.shape, 0)
                tensors[f"{key}.{name}"] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        out = _call(module, tensors, example)
    except Exception:  # it cannot be split like that
        return False
    finally:
        handle.remove()
        for split in splits:
            split.detach()
    return arrived == [True] and not isinstance(out, ChannelShardedTensor)


def _call(module: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Any:
    with torch.no_grad(), attributes_kept(module):
        return functional_call(module, tensors, (x.to(_dtype(module)),))


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _meta_tensors(module: nn.Module) -> dict[str, Tensor]:
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in named}


class _Simulated:
    """Stands for rank 0 of a group; a tensor that has to be gathered ends the trial."""

    rank = 0

    def __init__(self, size: int):
        self.size = size

    def all_reduce(self, x: Tensor) -> _Simulated:
        return self

    def wait(self) -> None:
        return None

    def all_gather(self, *_: Any) -> NoReturn:
        raise RuntimeError("an activation would be gathered")


class _NoRng(TensorParallelRng):
    @contextmanager
    def forked(self, x: Tensor) -> Iterator[None]:
        yield
