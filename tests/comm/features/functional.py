"""Functional collectives, plain, with gradients, and under torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.comm.features.feature import Rank, feature, model, named, train


def world() -> Any:
    return dist.group.WORLD


def everything(data: Tensor, size: int) -> list[Tensor]:
    total = functional.all_reduce(data, "sum", world())
    gathered = functional.all_gather_tensor(total * 2, 0, world())
    piece = functional.reduce_scatter_tensor(gathered, "sum", 0, world())
    root = functional.broadcast(piece + data, 1, world())
    turned = functional.all_to_all_single(gathered, None, None, world())
    return [total, gathered, piece, root, turned]


@feature
def functional_collectives(at: Rank) -> list[Tensor]:
    return everything(at.numbers(), at.size)


@feature
def functional_collectives_compiled(at: Rank) -> list[Tensor]:
    torch._dynamo.reset()
    compiled: Any = torch.compile(everything, backend="aot_eager", fullgraph=True)
    return compiled(at.numbers(), at.size)  # type: ignore[no-any-return]


@feature
def collectives_in_place_compiled(at: Rank) -> Tensor:
    def body(data: Tensor) -> Tensor:
        out = data.new_zeros(6 * at.size)
        dist.all_reduce(data)
        dist.all_gather_into_tensor(out, data + 1)
        return out * 2

    torch._dynamo.reset()
    compiled: Any = torch.compile(body, backend="aot_eager", fullgraph=True)
    return compiled(at.numbers())  # type: ignore[no-any-return]


@feature
def functional_gradients(at: Rank) -> Any:
    data = at.numbers(2 * at.size).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(data, 0, world())
    piece = functional.reduce_scatter_tensor_autograd(gathered.square(), "sum", 0, world())
    turned = functional.all_to_all_single_autograd(piece, None, None, world())
    (turned * at.numbers(2 * at.size)).sum().backward()
    return data.grad


@feature
def functional_permutation(at: Rank) -> Tensor:
    targets = [(rank + 1) % at.size for rank in range(at.size)]
    return functional.permute_tensor(at.numbers(), targets, world()) * 1


def with_gradient(at: Rank, name: str) -> Any:
    data = at.numbers(at.size).requires_grad_()
    parts = list(data.split(1))
    out: Any
    if name in ("all_to_all", "reduce_scatter", "scatter"):
        like: Any = [torch.zeros(1) for _ in parts] if name == "all_to_all" else torch.zeros(1)
        out = getattr(differentiable, name)(*((parts,) if name == "scatter" else (like, parts)))
    elif name in ("broadcast", "reduce"):
        out = getattr(differentiable, name)(data * 1, 0)
    else:
        out = getattr(differentiable, name)(data * 1)
    tensors = [out] if isinstance(out, Tensor) else list(out)
    sum((tensor * (at.rank + 1)).square().sum() for tensor in tensors).backward()  # type: ignore[union-attr]
    return data.grad


for each in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "scatter", "gather"):
    named(f"{each} with a gradient", partial(with_gradient, name=each))
for each in ("broadcast", "reduce"):
    named(f"{each} with a gradient", partial(with_gradient, name=each))


@feature
def ddp_compiled(at: Rank) -> list[Tensor]:
    torch._dynamo.reset()
    net: Any = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    return train(net, at)


@feature
def ddp_of_a_compiled_model(at: Rank) -> list[Tensor]:
    torch._dynamo.reset()
    inner: Any = torch.compile(model(), backend="aot_eager")
    return train(DistributedDataParallel(inner), at)
