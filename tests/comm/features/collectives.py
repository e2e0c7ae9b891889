"""All collectives in all forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.features.feature import Rank, feature, named

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
def all_reduce_of_bool(at: Rank) -> Tensor:
    data = at.numbers() > 2
    dist.all_reduce(data, op=dist.ReduceOp.BOR)
    return data


@feature
def all_reduce_with_a_factor(at: Rank) -> Tensor:
    data = at.numbers()
    dist.all_reduce(data, op=dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    return data


@feature
def all_reduce_of_views_and_scalars(at: Rank) -> list[Tensor]:
    transposed = at.numbers(6).view(2, 3).t()
    scalar = torch.tensor(float(at.rank))
    empty = torch.empty(0)
    for data in (transposed, scalar, empty):
        dist.all_reduce(data)
    return [transposed, scalar, empty]


@feature
def all_reduce_large(at: Rank) -> Tensor:
    data = at.numbers(300_000)
    dist.all_reduce(data)
    return data.sum()


@feature
def all_gather_uneven(at: Rank) -> list[Tensor]:
    out = [torch.zeros(rank + 1) for rank in range(at.size)]
    dist.all_gather(out, at.numbers(at.rank + 1))
    return out


@feature
def all_gather_into_tensor(at: Rank) -> list[Tensor]:
    flat = torch.zeros(6 * at.size)
    stacked = torch.zeros(at.size, 6)
    dist.all_gather_into_tensor(flat, at.numbers())
    dist.all_gather_into_tensor(stacked, at.numbers())
    return [flat, stacked]


def pieces(at: Rank, uneven: bool) -> list[Tensor]:
    return [at.numbers(rank + 1 if uneven else 3) for rank in range(at.size)]


def reduce_scatter(at: Rank, uneven: bool) -> Tensor:
    given = pieces(at, uneven)
    out = torch.zeros_like(given[at.rank])
    dist.reduce_scatter(out, given)
    return out


named("reduce_scatter", partial(reduce_scatter, uneven=False))
named("reduce_scatter uneven", partial(reduce_scatter, uneven=True))


@feature
def reduce_scatter_uneven_max(at: Rank) -> list[Tensor]:
    given = [at.numbers(4 - rank).view(1, -1) for rank in range(at.size)]
    out = torch.zeros_like(given[at.rank])
    work = dist.reduce_scatter(out, given, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()  # type: ignore[union-attr]
    return [out, *given]


@feature
def reduce_scatter_tensor(at: Rank) -> Tensor:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, at.numbers(2 * at.size))
    return out


def all_to_all(at: Rank, uneven: bool) -> list[Tensor]:
    given = pieces(at, uneven)
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
    everything: list[Any] = [None] * at.size
    dist.all_gather_object(everything, {"rank": at.rank, "text": "x" * at.rank})
    gathered: list[Any] | None = [None] * at.size if at.rank == 0 else None
    dist.gather_object(("rank", at.rank), gathered, dst=0)
    given: list[Any] = ["a", {"b": 1}] if at.rank == 0 else [None, None]
    dist.broadcast_object_list(given, src=0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(at.size)) if at.rank == 0 else None, src=0)
    return [everything, gathered, given, mine]
