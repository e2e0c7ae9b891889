"""Slices of tensors, crossings between ranks, and logits that are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.replica.microbatch_context import TensorParallelRng
from shoal.replica.split.mapping import (
    ShardSpec,
    copy,
    even_ranges,
    gather,
    gather_sequence,
    reduce,
    reduce_scatter,
    scatter,
)
from shoal.replica.tensor.activations import SequenceParallelTensor, VocabParallelLogits
from shoal.replica.tensor.linear import VocabularyEmbedding
from shoal.replica.tensor.plan import plan_of
from shoal.replica.tensor.roles import HeadSplit
from shoal.strategy.split_terms import Tp
from tests.conftest import World, run_world
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import assert_equal, model, refused, train


def test_cuts_hold_whole_units_and_are_as_equal_as_can_be() -> None:
    assert even_ranges(12, 2, 4) == [range(8), range(8, 12)]
    assert even_ranges(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]


def test_queries_keys_and_values_are_cut_apart() -> None:
    spec = ShardSpec.of_blocks(0, 3, 4, 2, 2)
    assert spec.take_shard(torch.arange(12), 1).tolist() == [2, 3, 6, 7, 10, 11]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_pieces_make_the_whole(parts: int, unit: int, blocks: int, dim: int, data: Any) -> None:
    size = unit * data.draw(st.integers(parts, 9))
    spec = ShardSpec.of_blocks(dim, blocks, size, parts, unit)
    shape = [2, 3, 2]
    shape[dim] = blocks * size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = [spec.take_shard(whole, rank) for rank in range(parts)]
    assert [spec.shard_shape(shape, rank) for rank in range(parts)] == [p.shape for p in pieces]
    assert torch.equal(spec.concatenate(pieces), whole)


@pytest.mark.parametrize(
    ("cross", "out", "grad"),
    [
        (lambda x, s, g: copy(x, g), [0, 1, 2], [2, 2, 2]),
        (lambda x, s, g: reduce(x, g), [0, 2, 4], [1, 1, 1]),
        (lambda x, s, g: gather(s.take_shard(x, g.rank), s, g), [0, 1, 2], [[1, 1, 0], [0, 0, 1]]),
        (lambda x, s, g: scatter(x, s, g), [[0, 1], [2]], [1, 1, 1]),
        (lambda x, s, g: reduce_scatter(x, s, g), [[0, 2], [4]], [1, 1, 1]),
        (
            *(lambda x, s, g: gather_sequence(s.take_shard(x, g.rank), s, g), [0, 1, 2]),
            [[2, 2, 0], [0, 0, 2]],
        ),
    ],
    ids=["copy", "reduce", "gather", "scatter", "reduce_scatter", "gather_sequence"],
)
def test_crossings(world: World, cross: Callable[..., Tensor], out: Any, grad: Any) -> None:
    spec = ShardSpec.even(0, 3, 2)

    def body(group: Group) -> tuple[list[float], list[float]]:
        x = torch.arange(3.0, requires_grad=True)
        found = cross(x, spec, group)
        found.sum().backward()
        return found.tolist(), x.grad.tolist()

    for rank, found in enumerate(world(2, body)):
        for value, expected in zip(found, (out, grad), strict=True):
            assert value == (expected[rank] if isinstance(expected[0], list) else expected)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "view": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "ignoring": lambda x, y: F.cross_entropy(x.reshape(-1, 7).float(), y.view(-1), ignore_index=2),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").max(),
    # the others look at all classes
    "smooth": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "moved": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "written": lambda x, y: -x.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "operators": lambda x, y: (2 * x - x[..., :1]).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_split_logits(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[ShardSpec] = []

    def noting(x: Tensor, spec: ShardSpec, group: Group) -> Tensor:
        gathers.append(spec)
        return gather(x, spec, group)

    monkeypatch.setattr("shoal.replica.tensor.activations.gather", noting)
    generator = torch.Generator().manual_seed(0)
    values = 50 * torch.randn(2, 5, 7, generator=generator)
    targets = torch.randint(0, 7, (2, 5), generator=generator)
    whole = values.clone().requires_grad_()
    expected = LOSSES[name](whole, targets)
    expected.backward()
    spec = ShardSpec.even(2, 7, 3)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        local = spec.take_shard(values, group.rank).requires_grad_()
        logits = VocabParallelLogits.of(local, spec, group)
        assert logits.shape == (2, 5, 7) and logits.dim() == 3 and logits.requires_grad
        loss = LOSSES[name](logits, targets)
        loss.backward()
        return loss.detach(), local.grad

    for rank, (loss, grad) in enumerate(world(3, body)):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(grad, spec.take_shard(whole.grad, rank), atol=1e-6, rtol=1e-5)
    looks_at_all = ("smooth", "moved", "written", "operators")
    assert bool(gathers) == (name in looks_at_all)


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (
            lambda group: VocabularyEmbedding.become(
                nn.Embedding(5, 2), group, TensorParallelRng(group.rank, False)
            )(torch.tensor([1, 5])),
            "outside of the 5",
        ),
        (
            lambda group: F.cross_entropy(
                VocabParallelLogits.of(torch.zeros(1, 2), ShardSpec.even(1, 4, 2), group),
                torch.tensor([4]),
            ),
            "Target 4 is out of bounds",
        ),
    ],
)
def test_ids_and_targets_outside_are_refused(world: World, compute: Any, said: str) -> None:
    with pytest.raises(IndexError, match=said):
        world(2, compute)


def test_between_column_and_row_every_rank_draws_for_itself() -> None:
    x = torch.zeros(1)
    drawn = []
    for rank in range(2):
        torch.manual_seed(7)
        rng = TensorParallelRng(rank, True)
        rng.fork(x)
        rng.fork(x)  # queries, keys and values are three column layers
        inside = torch.rand(3 + rank).tolist()  # uneven slices draw unevenly
        rng.restore(x)
        drawn.append((inside[0], torch.rand(3).tolist()))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] == drawn[1][1]


def roles(model: nn.Module, tp: Tp) -> dict[str, str]:
    return {name: role.kind for name, role in plan_of(model, tp).items()}


def test_what_is_found_by_itself() -> None:
    chain = nn.Sequential(
        *(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)),
        *(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1), nn.Linear(8, 8)),
        *(nn.Tanh(), nn.Linear(8, 2)),
    )
    assert roles(chain, Tp(2)) == {"0": "column", "3": "row", "8": "column", "10": "row"}
    layer = nn.TransformerEncoderLayer(8, 4, 16)
    assert roles(nn.Sequential(layer), Tp(4)) == {
        "0.self_attn": "attention",
        "0.linear1": "column",
        "0.linear2": "row",
    }
    assert roles(nn.Sequential(layer), Tp(8)) == {"0.linear1": "column", "0.linear2": "row"}


def test_layers_around_blocks_stay_whole() -> None:
    around = nn.Module()
    around.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 1)
    around.project_in, around.project_out = nn.Linear(4, 8), nn.Linear(8, 4)
    assert {name.split(".")[0] for name in roles(around, Tp(2))} == {"body"}


def test_weights_that_are_shared_or_computed_stay_whole() -> None:
    def chain() -> nn.Sequential:
        return nn.Sequential(
            *(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            *(nn.Softmax(1), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
        )

    shared, computed = chain(), chain()
    shared[2].weight = shared[0].weight
    nn.utils.parametrizations.weight_norm(computed[2])
    assert roles(shared, Tp(2)) == roles(computed, Tp(2)) == {"4": "column", "6": "row"}


def test_heads_of_ranks() -> None:
    def queries_and_keys(heads: int, keys: int, ranks: int) -> Any:
        split = HeadSplit.of(heads, keys, 2, ranks)
        return split and [
            (list(q), list(k)) for q, k in zip(split.queries, split.keys, strict=True)
        ]

    assert queries_and_keys(4, 2, 2) == [([0, 1], [0]), ([2, 3], [1])]
    assert queries_and_keys(3, 3, 2) == [([0, 1], [0, 1]), ([2], [2])]
    assert queries_and_keys(4, 2, 4) == [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])]
    assert queries_and_keys(6, 2, 3) == [([0, 1], [0]), ([2], [0]), ([3, 4, 5], [1])]
    assert queries_and_keys(2, 2, 4) is None


class Attention(nn.Module):
    """Grouped queries; a norm of the features of a head."""

    def __init__(self, width: int = 12, heads: int = 6, key_heads: int = 2):
        super().__init__()
        self.n_heads = heads
        self.n_kv_heads = key_heads
        self.head_dim = width // heads
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, key_heads * self.head_dim)
        self.wv = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.q_norm(self.wq(x).view(batch, time, self.n_heads, -1)).transpose(1, 2)
        k, v = (w(x).view(batch, time, self.n_kv_heads, -1) for w in (self.wk, self.wv))
        repeats = self.n_heads // self.n_kv_heads
        k, v = (t.transpose(1, 2).repeat_interleave(repeats, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.wo(out.reshape(batch, time, -1))


@model(w1=(12, 18), w2=(18, 12), w3=(12, 18))
def gated_mlp(self: Any, x: Tensor) -> Tensor:
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def attention_and_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.LayerNorm(12), gated_mlp(), nn.Linear(12, 3))


def test_an_attention_and_an_mlp_are_found_by_their_structure() -> None:
    assert roles(attention_and_mlp(), Tp(2)) == {
        **{"0": "heads", "0.wq": "column", "0.wk": "column", "0.wv": "column", "0.wo": "row"},
        **{"0.q_norm": "summed", "2.w1": "column", "2.w3": "column", "2.w2": "row"},
    }
    shared = roles(attention_and_mlp(), Tp(3))
    assert shared["0.wk"] == shared["0.wv"] == "selected"


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_found_trains_as_on_one_worker(world: World, size: int) -> None:
    x = torch.randn(12, 5, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[..., :3])
    options: dict[str, Any] = {"loss": F.mse_loss, "clip_norm": 0.1}
    assert_equal(world, size, f"tp({size})", attention_and_mlp, data, 6, **options)


def test_a_plan_goes_before_what_is_found() -> None:
    chain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    found = plan_of(chain, Tp(2, plan={"2": "column"}))
    assert {name: (role.kind, role.output) for name, role in found.items()} == {
        "2": ("column", "logits")
    }


@model(fc1=(6, 12), fc2=(12, 6))
def misleading(self: Any, x: Tensor) -> Tensor:
    """Looks like an MLP; between its layers the features are not on their own."""
    return self.fc2(self.fc1(x).softmax(-1))


class CrossHead(Attention):
    """Adds up its heads, which are on two ranks."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.wq(x).view(batch, time, self.n_heads, -1)
        mixed = (q + q.mean(2, keepdim=True)).reshape(batch, time, -1)
        return self.wo(mixed + self.wk(x).sum() + self.wv(x).sum())


class FixedWidth(Attention):
    """Takes the width of its input for that of its heads."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).view(*x.shape)
        return self.wo(q + self.wk(x).sum() + self.wv(x).sum())


def test_an_attention_that_cannot_run_with_some_heads_stays_whole() -> None:
    model = nn.Sequential(FixedWidth(), gated_mlp())
    assert roles(model, Tp(2)) == {"1.w1": "column", "1.w3": "column", "1.w2": "row"}


@pytest.mark.parametrize(
    ("wrong", "width", "layer"), [(misleading, 6, "fc2"), (CrossHead, 12, "wo")]
)
def test_a_wrong_guess_is_refused_before_the_first_step(
    world: World, wrong: Callable[[], nn.Module], width: int, layer: str
) -> None:
    made = []

    @seeded(0)
    def make() -> nn.Module:
        made.append(nn.Sequential(wrong(), nn.Linear(width, 3)))
        return made[-1]

    x = torch.randn(8, 5, width)
    data = TensorDataset(x, x[..., :3])
    said = refused(world, 2, "tp(2)", make, data, loss=F.mse_loss)
    assert f"where 0.{layer} and the layers around it are split, it does not compute" in said
    assert torch.equal(made[0][1].bias, make()[1].bias)
    models = [make(), make()]
    kept = 'tp(2, plan={"0": "whole", "1": "column"})'
    world(2, lambda g: train(g, kept, models[g.rank], data, 4, loss=F.mse_loss))


@model(first=lambda: nn.LSTM(6, 6, batch_first=True), up=(6, 16), down=(16, 3))
def normed(self: Any, x: Tensor) -> Tensor:
    """Between its layers all features are needed, which their names and shapes do not tell."""
    return self.down(F.layer_norm(self.up(self.first(x[:, None])[0][:, 0]), (16,)))


def test_the_layer_whose_features_were_spread_is_named(world: World) -> None:
    assert 'plan={"up": "whole"}' in refused(world, 2, "tp(2)", normed, samples(8))
    assert_equal(world, 2, 'tp(2, plan={"up": "whole"})', normed, samples(8), 4)


# ---- activations of which every rank has some positions -----------------------------------------

Function = Callable[[Tensor, Tensor, nn.Module], Tensor]


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
        return stays, (out.full() if stays else out).detach(), found

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
