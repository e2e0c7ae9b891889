"""Collectives, messages, works and groups; functional collectives, with gradients and compiled."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.comm.features import Rank, feature, model, named, train

OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
DTYPES = ["float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "complex64"]


def all_reduce(at: Rank, op: str = "SUM", dtype: str = "int64") -> Tensor:
    data = at.numbers(dtype=getattr(torch, dtype))
    dist.all_reduce(data, op=getattr(dist.ReduceOp, op))
    return data


for each in OPS:
    named(f"all_reduce {each}", partial(all_reduce, op=each, dtype="int32"))
for each in DTYPES:
    named(f"all_reduce of {each}", partial(all_reduce, dtype=each))


@feature
def all_reduce_with_a_factor(at: Rank) -> Tensor:
    data = at.numbers()
    dist.all_reduce(data, op=dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    return data


@feature
def all_gather_into_tensor(at: Rank) -> list[Tensor]:
    flat = torch.zeros(6 * at.size)
    stacked = torch.zeros(at.size, 6)
    dist.all_gather_into_tensor(flat, at.numbers())
    dist.all_gather_into_tensor(stacked, at.numbers())
    return [flat, stacked]


def reduce_scatter(at: Rank, uneven: bool) -> list[Tensor]:
    given = [at.numbers(rank + 1 if uneven else 3).view(1, -1) for rank in range(at.size)]
    out = torch.zeros_like(given[at.rank])
    dist.reduce_scatter(out, given, op=dist.ReduceOp.MAX)
    return [out, *given]


named("reduce_scatter", partial(reduce_scatter, uneven=False))
named("reduce_scatter uneven", partial(reduce_scatter, uneven=True))


@feature
def reduce_scatter_tensor(at: Rank) -> Tensor:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, at.numbers(2 * at.size))
    return out


def all_to_all(at: Rank, uneven: bool) -> list[Tensor]:
    given = [at.numbers(rank + 1 if uneven else 3) for rank in range(at.size)]
    out = [torch.zeros(at.rank + 1 if uneven else 3) for _ in range(at.size)]
    dist.all_to_all(out, given)
    return out


named("all_to_all", partial(all_to_all, uneven=False))
named("all_to_all uneven", partial(all_to_all, uneven=True))


@feature
def all_to_all_uneven_on_one_rank_only(at: Rank) -> list[Tensor]:
    """The other ranks see pieces of one size."""
    last = at.size - 1
    lengths = [2 if at.rank == peer == last else 1 for peer in range(at.size)]
    out = [torch.zeros(length) for length in lengths]
    dist.all_to_all(out, [at.numbers(length) for length in lengths])
    return out


@feature
def all_to_all_single_uneven(at: Rank) -> Tensor:
    splits = [rank + 1 for rank in range(at.size)]
    out = torch.zeros((at.rank + 1) * at.size, 2)
    data = at.numbers(2 * sum(splits)).view(-1, 2)
    dist.all_to_all_single(out, data, [at.rank + 1] * at.size, splits)
    return out


@feature
def objects(at: Rank) -> list[Any]:
    gathered: list[Any] | None = [None] * at.size if at.rank == 0 else None
    dist.gather_object(("rank", at.rank), gathered, dst=0)
    given: list[Any] = ["a", {"b": 1}] if at.rank == 0 else [None, None]
    dist.broadcast_object_list(given, src=0)
    return [gathered, given]


# ------------------------------------------------------------------ works and groups


@feature
def works(at: Rank) -> list[Any]:
    data = at.numbers()
    work: Any = dist.all_reduce(data, async_op=True)
    ended = work.wait(timedelta(seconds=20))
    return [ended, work.is_completed(), work.is_success(), data]


@feature
def futures_of_gathers(at: Rank) -> Any:
    out = [torch.zeros(6) for _ in range(at.size)]
    work: Any = dist.all_gather(out, at.numbers(), async_op=True)
    work.get_future().wait()
    return out


@feature
def coalescing(at: Rank) -> list[Any]:
    sums = [at.numbers(3), at.numbers(4)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for each in sums:
            dist.all_reduce(each)
    gathered = [torch.zeros(3 * at.size), torch.zeros(4 * at.size)]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for out, count in zip(gathered, (3, 4), strict=True):
            dist.all_gather_into_tensor(out, at.numbers(count))
    manager.wait()
    pieces = [torch.zeros(3), torch.zeros(4)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for out in pieces:
            dist.reduce_scatter_tensor(out, at.numbers(at.size * out.numel()))
    return [sums, gathered, pieces]


@feature
def new_group_of_its_members(at: Rank) -> Tensor:
    """Before other new groups: torch names it by how many groups a rank has seen."""
    data = at.numbers()
    if at.rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.broadcast(data, group=group, group_src=1)
    return data


@feature
def groups(at: Rank) -> list[Any]:
    members = [at.size - 1, 0]
    found: list[Any] = []
    for group in (
        dist.new_group(members),
        dist.new_group(backend="gloo"),
        dist.new_subgroups(at.size // 2)[0],
    ):
        found.append(at.numbers())
        if at.rank in members or len(found) > 1:
            dist.all_reduce(found[-1], group=group)
            found.append(dist.get_process_group_ranks(group))
    return found


# ------------------------------------------------------------------ functional


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


def compiled(body: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(body, backend="aot_eager", **options)


@feature
def functional_collectives_compiled(at: Rank) -> Any:
    return compiled(everything, fullgraph=True)(at.numbers(), at.size)


@feature
def collectives_in_place_compiled(at: Rank) -> Any:
    def body(data: Tensor) -> Tensor:
        out = data.new_zeros(6 * at.size)
        dist.all_reduce(data)
        dist.all_gather_into_tensor(out, data + 1)
        return out * 2

    return compiled(body, fullgraph=True)(at.numbers())


@feature
def ddp_compiled(at: Rank) -> list[Tensor]:
    return train(compiled(DistributedDataParallel(model())), at)


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
