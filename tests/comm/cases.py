"""One call of one collective as data: what goes in, how it is called, what must come out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group, Op
from shoal.comm.transport.transport import Transport

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
}


@dataclass(frozen=True)
class Case:
    """`shape` is that of the vector, or of one rank's piece; `layout` how it lies in memory."""

    kind: str
    algorithm: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    root: int
    seed: int
    layout: str
    out_of_place: bool
    segment_bytes: int
    background: bool


@st.composite
def cases(draw: st.DrawFn, kind: str, algorithm: str) -> Case:
    dtype = draw(st.sampled_from(list(DTYPES)))
    ops = ["max", "min", "prod"] if dtype == "bool" else ["sum", "mean", "max", "min", "prod"]
    return Case(
        kind,
        algorithm,
        draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)),
        dtype,
        draw(st.sampled_from(ops)),
        draw(st.integers(0, 8)),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from(["plain", "strided", "turned"])),
        draw(st.booleans()),
        draw(st.sampled_from([32, 256, 1 << 20])),
        draw(st.booleans()),
    )


def group_for(transport: Transport, case: Case) -> Group:
    return Group(
        Scheduled(
            transport,
            {case.kind: case.algorithm},
            segment_bytes=case.segment_bytes,
            background=case.background,
        )
    )


def given_to(case: Case, rank: int, size: int) -> Tensor:
    """What `rank` brings along: a vector, a piece, or `size` pieces (first dimension)."""
    generator = torch.Generator().manual_seed(case.seed + rank)
    shape = case.shape
    if case.kind in ("scatter", "reduce_scatter", "all_to_all"):
        shape = (size, *shape)
    dtype = DTYPES[case.dtype]
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.7
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 3 - 1.5).to(dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, in every second place or with dimensions turned round."""
    if layout == "strided":
        wide = tensor.new_zeros((*tensor.shape, 2))
        wide[..., 0] = tensor
        return wide[..., 0]
    if layout == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.clone()


def call(group: Group, case: Case) -> Tensor:
    """Call the collective, and give what this rank got; a rank that gets nothing: its input."""
    root = case.root % group.size
    op = Op(case.op)
    size = group.size
    data = laid_out(given_to(case, group.rank, size), case.layout)
    at_root = group.rank == root
    if case.kind == "all_gather":
        out = laid_out(data.new_zeros((size, *case.shape)), case.layout)
        group.all_gather(out, data).wait()
    elif case.kind == "reduce_scatter":
        out = laid_out(data.new_zeros(case.shape), case.layout)
        group.reduce_scatter(out, data, op).wait()
    elif case.kind == "all_to_all":
        out = data if not case.out_of_place else laid_out(torch.zeros_like(data), case.layout)
        group.all_to_all(out, data).wait()
    elif case.kind == "gather":
        out = laid_out(data.new_zeros((size, *case.shape)), case.layout) if at_root else data
        group.gather(out if at_root else None, data, root).wait()
    elif case.kind == "scatter":
        out = laid_out(data.new_zeros(case.shape), case.layout)
        group.scatter(out, data if at_root else None, root).wait()
    else:
        out = _call_whole(group, case, data, root, op)
    if out is not data:
        assert torch.equal(data, given_to(case, group.rank, size)), "the input was changed"
    return out


def _call_whole(group: Group, case: Case, data: Tensor, root: int, op: Op) -> Tensor:
    out = laid_out(torch.zeros_like(data), case.layout) if case.out_of_place else None
    if case.kind == "all_reduce":
        group.all_reduce(data, op, out=out).wait()
        return data if out is None else out
    if case.kind in ("scan", "exclusive_scan"):
        group.scan(data, op, exclusive=case.kind == "exclusive_scan", out=out).wait()
        return data if out is None else out
    if case.kind == "reduce":
        group.reduce(data, root, op).wait()
    elif case.kind == "broadcast":
        group.broadcast(data, root).wait()
    else:
        group.barrier().wait()
    return data


def expected(case: Case, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What `rank` must hold, and how far off rounding may take it; in the widest type."""
    root = case.root % size
    given = [widened(given_to(case, peer, size)) for peer in range(size)]
    nothing = torch.zeros((), dtype=torch.float64)
    if case.kind == "broadcast":
        return given[root], nothing
    if case.kind == "all_gather" or (case.kind == "gather" and rank == root):
        return torch.stack(given), nothing
    if case.kind == "scatter":
        return given[root][rank], nothing
    if case.kind == "all_to_all":
        return torch.stack([pieces[rank] for pieces in given]), nothing
    if case.kind == "all_reduce" or (case.kind == "reduce" and rank == root):
        return combined(given, case)
    if case.kind == "reduce_scatter":
        return combined([pieces[rank] for pieces in given], case)
    if case.kind == "scan":
        return combined(given[: rank + 1], case)
    if case.kind == "exclusive_scan" and rank > 0:
        return combined(given[:rank], case)
    if case.kind == "exclusive_scan":
        return torch.full_like(given[0], identity(case)), nothing
    return given[rank], nothing


def combined(values: list[Tensor], case: Case) -> tuple[Tensor, Tensor]:
    stacked = torch.stack(values)
    exact = not DTYPES[case.dtype].is_floating_point
    eps = 0.0 if exact else torch.finfo(DTYPES[case.dtype]).eps
    slack = 2 * eps * len(values)
    if case.op in ("max", "min"):
        return (stacked.amax(0) if case.op == "max" else stacked.amin(0)), torch.zeros(())
    if case.op == "prod":
        product = stacked.prod(0)
        return product, product.abs() * slack + (0 if exact else 1e-4 * (eps > 1e-4))
    total = stacked.sum(0)
    size = stacked.abs().sum(0) * slack
    if case.op == "mean":
        mean = total / len(values)
        return (mean.trunc() if exact else mean), size
    return total, size


def identity(case: Case) -> float:
    dtype = DTYPES[case.dtype]
    if case.op in ("sum", "mean"):
        return 0
    if case.op == "prod":
        return 1
    if dtype == torch.bool:
        return float(case.op == "min")
    if dtype.is_floating_point:
        return math.inf if case.op == "min" else -math.inf
    return getattr(torch.iinfo(dtype), case.op.replace("min", "MAX").replace("max", "min").lower())


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


def check(case: Case, got: Tensor, rank: int, size: int) -> None:
    """Raise unless the numbers are right; integers to the last one."""
    want, slack = expected(case, rank, size)
    if not DTYPES[case.dtype].is_floating_point:
        want = want.to(DTYPES[case.dtype])  # wraps round as the sum itself does
        assert torch.equal(got, want), f"rank {rank} of {size}: {got} instead of {want}"
        return
    off = (widened(got) - want).abs()
    fine = (off <= slack) | (widened(got) == want)
    assert bool(fine.all()), f"rank {rank} of {size}: {got} instead of {want}"
