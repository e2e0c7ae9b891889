"""Activations of which every rank of a tp group has some positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.split.mapping import gather_sequence, reduce_scatter
from shoal.replica.tensor.activations import SequenceParallelTensor, pack, unpack
from shoal.replica.tensor.rng import TensorParallelRng
from shoal.replica.tensor.shard_spec import ShardSpec
from tests.conftest import World, run_world

Function = Callable[[Tensor, Tensor, nn.Module], Tensor]


def test_crossings_of_rows(world: World) -> None:
    spec = ShardSpec.even(0, 3, 2)

    def body(group: Group) -> list[Any]:
        x = torch.arange(3.0).view(3, 1).requires_grad_()
        total = reduce_scatter(x, spec, group)
        (total * 10).sum().backward()  # type: ignore[no-untyped-call]
        piece = spec.take_shard(x.detach(), group.rank).requires_grad_()
        whole = gather_sequence(piece, spec, group)
        (whole * (1 + group.rank)).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and piece.grad is not None
        return [t.flatten().tolist() for t in (total, x.grad, whole, piece.grad)]

    assert world(2, body) == [
        [[0, 2], [10, 10, 10], [0, 1, 2], [3, 3]],
        [[4], [10, 10, 10], [0, 1, 2], [3]],
    ]


STAY: dict[str, Function] = {
    "norm": lambda x, y, m: m(x),
    "rms": lambda x, y, m: F.rms_norm(x, (4,), m.weight),
    "residual": lambda x, y, m: m(x) + y + x,
    "from the left": lambda x, y, m: y - F.gelu(x) * 2,
    "a vector": lambda x, y, m: x * m.weight + m.bias,
    "altered as a whole": lambda x, y, m: altered(m(x), y),
    "positions": lambda x, y, m: (x + y[0]) / 3,
    "looked at": lambda x, y, m: x.cumsum(1) + added(m(x), x.cumsum(1)),
    "in place": lambda x, y, m: added(m(x), y),
    "from a number": lambda x, y, m: 1 - x / 2,
    "flat and back": lambda x, y, m: m(x.view(-1, x.size(-1))).reshape(x.shape),
    "shape": lambda x, y, m: x * x.shape[1] + x.size(0) * x.dim(),
}
GATHER: dict[str, Function] = {
    "norm of all": lambda x, y, m: F.layer_norm(x, x.shape[1:]),
    "transposed": lambda x, y, m: (x.transpose(0, 1) * 2).transpose(0, 1),
    "cumulative": lambda x, y, m: x.cumsum(1),
    "a larger one": lambda x, y, m: (x + y[None, None])[0, 0],
}


def added(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def altered(x: Tensor, y: Tensor) -> Tensor:
    x.clamp_(-1, 1)
    return F.gelu(x) + y


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(out.numel()).view(out.shape) % 5
    found = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("name", [*STAY, *GATHER])
@settings(max_examples=8, deadline=None)
@given(batch=st.integers(1, 3), time=st.integers(1, 5), ranks=st.integers(2, 4))
def test_functions_give_what_they_give_of_the_whole(
    name: str, batch: int, time: int, ranks: int
) -> None:
    """Also where there are fewer positions than ranks. Gradients are the same on every rank."""
    function = {**STAY, **GATHER}[name]
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch, time, 4, generator=generator) for _ in range(2))
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight, generator=generator)

    def leaves() -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (x, y)]

    a, b = leaves()
    expected = function(a, b, norm)
    wanted = gradients(expected, [a, b, norm.weight, norm.bias])

    def body(group: Group) -> tuple[bool, Tensor, list[Tensor]]:
        a, b = leaves()
        # terms of a sum, of which this rank has one
        split = SequenceParallelTensor.summed(
            a / group.size, group, TensorParallelRng(group.rank, False)
        )
        out = function(split, b, norm)
        found = gradients(out, [a, b, norm.weight, norm.bias])
        stays = isinstance(out, SequenceParallelTensor)
        return (
            stays,
            (out.full() if isinstance(out, SequenceParallelTensor) else out).detach(),
            found,
        )

    for stays, out, found in run_world(ranks, body):
        assert stays == (name in STAY)
        torch.testing.assert_close(out, expected.detach())
        found[0] = found[0] * ranks
        for grad, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(grad, right, atol=1e-5, rtol=1e-5)


def test_dropout_of_rows_is_drawn_apart(world: World) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor]:
        split = SequenceParallelTensor.summed(
            torch.ones(2, 64, 4), group, TensorParallelRng(group.rank, True)
        )
        out = F.dropout(split, 0.5)
        assert isinstance(out, SequenceParallelTensor)
        return out.local, out.full()

    (first, whole), (second, other) = world(2, body)
    assert torch.equal(whole, other)
    assert not torch.equal(first, second)
    assert 0.3 < (whole == 0).float().mean() < 0.7


def test_rows_go_to_another_stage_as_plain_tensors(world: World) -> None:
    def body(group: Group) -> bool:
        rng = TensorParallelRng(group.rank, False)
        split = SequenceParallelTensor.summed(torch.ones(2, 3, 4), group, rng)
        tree = {"x": [split, torch.ones(1)], "n": ("a", 1, None)}
        packed = pack(tree)
        assert type(packed["x"][0][1]) is Tensor and packed["x"][0][1].shape == (3, 4)
        again = unpack(packed, group, rng)
        assert again["n"] == ("a", 1, None) and again["x"][0].shape == (2, 3, 4)
        return torch.equal(again["x"][0].full(), torch.full((2, 3, 4), 2.0))

    assert world(2, body) == [True, True]
