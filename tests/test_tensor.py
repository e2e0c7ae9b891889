"""Tensor parallelism trains the model that one worker trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.examples.gpt import GPT, Size, next_token_loss
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import convnet, samples
from tests.seeds import seeded
from tests.splitting import (
    ADAMW,
    SGD,
    assert_another_goes_on,
    assert_equal,
    assert_evaluates_equal,
    gpt,
    mlp,
    refused,
    saved_bytes,
    texts,
)

GPT_OPTIONS: dict[str, Any] = {"optimizer": ADAMW, "clip_norm": 1.0, "loss": next_token_loss}


@pytest.mark.parametrize("size", [2, 4])
def test_an_mlp_whose_widths_are_not_divided_evenly(world: World, size: int) -> None:
    assert_equal(world, size, f"tp({size})", mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.parametrize("options", [GPT_OPTIONS, {**GPT_OPTIONS, "optimizer": SGD}])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gpt_with_tied_embedding(world: World, size: int, options: dict[str, Any]) -> None:
    """It has 2 heads: on 3 and 4 workers its attention is whole on each."""
    assert_equal(world, size, f"tp({size})", partial(gpt, 2), texts(16), 8, **options)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (4, "ddp(bucket_mb=0.0001) + tp(2)"),
        pytest.param(4, "tp(2) + pp(2)", marks=pytest.mark.whole),
        pytest.param(4, 'tp(2) + pp(2, schedule="zb-h1")', marks=pytest.mark.whole),
        pytest.param(
            4, 'tp(2) + pp(2, recompute=True, schedule="interleaved")', marks=pytest.mark.whole
        ),
        (8, "ddp + tp(2) + pp(2)"),
        (4, 'gossip(graph="complete") + tp(2)'),
        pytest.param(4, "zero(1) + tp(2)", marks=pytest.mark.whole),
        (4, "zero(2) + tp(2)"),
        pytest.param(8, "zero(1) + tp(2) + pp(2)", marks=pytest.mark.whole),
    ],
)
def test_hybrids(world: World, size: int, strategy: str) -> None:
    assert_equal(world, size, strategy, gpt, texts(22), 8, **GPT_OPTIONS)
    assert_equal(world, size, strategy, mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "tp(2, sequence=True)"),
        pytest.param(3, "tp(3, sequence=True)", marks=pytest.mark.whole),
        pytest.param(4, "ddp + tp(2, sequence=True)", marks=pytest.mark.whole),
        pytest.param(4, "tp(2, sequence=True) + pp(2)", marks=pytest.mark.whole),
        pytest.param(4, 'tp(2, sequence=True) + pp(2, schedule="zb-h1")', marks=pytest.mark.whole),
        pytest.param(
            4,
            'tp(2, sequence=True) + pp(2, recompute=True, schedule="interleaved")',
            marks=pytest.mark.whole,
        ),
        pytest.param(8, "zero(1) + tp(2, sequence=True) + pp(2)", marks=pytest.mark.whole),
    ],
)
def test_positions_are_shared_out_between_the_layers(
    world: World, size: int, strategy: str
) -> None:
    """Micro-batches of 3 and 2 windows of 5: as many positions as no size divides."""
    assert_equal(world, size, strategy, gpt, texts(22, 5), 11, **GPT_OPTIONS)
    assert_equal(world, size, strategy, mlp, samples(28), 12, clip_norm=0.1)


class Encoder(nn.Module):
    """Three heads, which two workers do not divide; ids of 0 are padding."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first = batch_first
        self.ids = nn.Embedding(11, 12, padding_idx=0)
        layer = nn.TransformerEncoderLayer(
            12, 3, 10, 0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 11)
        self.head.weight = self.ids.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.ids(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.layers(x, mask=causal, src_key_padding_mask=torch.zeros(ids.shape), is_causal=True)
        logits: Tensor = self.head(x if self.batch_first else x.transpose(0, 1))
        return logits


@pytest.mark.parametrize("strategy", ["tp(2)", "tp(2, sequence=True)"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_layers(world: World, batch_first: bool, strategy: str) -> None:
    data = TensorDataset(*(t % 11 for t in texts(16).tensors))
    make = partial(Encoder, batch_first, not batch_first)
    assert_equal(world, 2, strategy, make, data, 8, loss=next_token_loss)


class Attending(nn.Module):
    """Looks at another sequence, and returns the weights of its attention, too."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.average = average
        self.attention = nn.MultiheadAttention(8, 4, kdim=6, vdim=5, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = x[..., :8]
        key = x[..., 2:8]
        value = x[..., 3:8]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out, weights = self.attention(
            query, key, value, attn_mask=mask, average_attn_weights=self.average
        )
        logits: Tensor = self.last(out).mean(1) + weights.square().sum((-1, -2)).view(
            len(x), -1
        ).sum(1, keepdim=True) * torch.arange(3.0)
        return logits


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("strategy", ["tp(2)", "tp(3)", "tp(2, sequence=True)"])
def test_multihead_attention(world: World, strategy: str, average: bool) -> None:
    make = partial(Attending, average)
    assert_equal(world, int(strategy[3]), strategy, make, samples(16, (5, 8)), 8)


class Gated(nn.Module):
    """Two layers that read the same input, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.gate = nn.Linear(5, 7)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        logits: Tensor = self.head(self.down(F.silu(self.gate(x)) * self.up(x)))
        return logits


LAYERS = ("first", "gate", "up", "down", "head")


@pytest.mark.parametrize(
    "plan",
    [
        {"gate": "column", "up": "column", "down": "row"},
        dict.fromkeys(LAYERS, "column"),
        dict.fromkeys(LAYERS, "row"),
        {"first": "column", "[gu]*": "column", "d?wn": "row", "*ad": "column"},
    ],
    ids=["gated", "columns", "rows", "patterns"],
)
def test_a_plan(world: World, plan: dict[str, str]) -> None:
    for sequence in (False, True):
        strategy = f"tp(2, plan={plan}, sequence={sequence})"
        assert_equal(world, 2, strategy, Gated, samples(20), 8, clip_norm=0.1)


def build(group: Group, strategy: str, model: nn.Module, **options: Any) -> tuple[Job, Step]:
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    return job, job.step(model, next_token_loss, **{"optimizer": ADAMW, **options})


def test_every_worker_holds_near_half_of_the_parameters(world: World) -> None:
    models = [gpt(2), gpt(2)]
    whole = sum(p.numel() for p in models[0].parameters())

    def body(group: Group) -> int:
        _, step = build(group, "tp(2)", models[group.rank])
        assert all(p.untyped_storage().nbytes() <= step.flat.data.nbytes for p in step.flat.params)
        return sum(p.numel() for p in step.flat.params)

    held = world(2, body)
    # norms, positions and the biases behind row layers are on both
    assert all(0.5 < part / whole < 0.6 for part in held)


def test_layers_that_are_not_split_stay_the_same_bit_for_bit(world: World) -> None:
    models = [gpt(2) for _ in range(4)]

    def body(group: Group) -> dict[str, Tensor]:
        job, step = build(group, "tp(4)", models[group.rank], clip_norm=0.5)
        for batch in job.batches(texts(32), 8):
            step(batch)
        tensor = step.shard.tensor
        assert tensor is not None
        return {n: p.detach().clone() for n, p in step.flat.named if n not in tensor.specs}

    first, *others = world(4, body)
    assert {"norm.weight", "blocks.0.attention.qkv.weight", "blocks.0.mlp.down.bias"} <= set(first)
    assert "tokens.weight" not in first and "blocks.0.mlp.up.bias" not in first
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name


def test_less_is_kept_of_a_sequence_that_is_shared_out(world: World) -> None:
    tokens = texts(8, 32).tensors[0]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(Size(4, 32, 2, 32, 1e-2), dropout=0.1)

    def backward(model: nn.Module) -> None:
        next_token_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]

    def body(group: Group, strategy: str, model: nn.Module) -> int:
        build(group, strategy, model)
        return saved_bytes(model, lambda: backward(model))

    whole = make()
    alone = saved_bytes(whole, lambda: backward(whole))
    for strategy, share in (("tp(2)", 0.7), ("tp(2, sequence=True)", 0.5)):
        models = [make(), make()]
        found = world(2, lambda g, s=strategy, m=models: body(g, s, m[g.rank]))
        assert all(share - 0.05 < kept / alone < share + 0.05 for kept in found), (found, alone)


def test_evaluating(world: World) -> None:
    def metrics(out: Tensor, y: Tensor) -> dict[str, Any]:
        return {
            "loss": next_token_loss(out, y),
            "right": (out.argmax(-1) == y).float().mean(),
            "first": out[:, 0, 0].mean(),
        }

    cases = ((2, "tp(2)"), (4, "tp(2) + pp(2)"), (2, "tp(2, sequence=True)"))
    assert_evaluates_equal(world, cases, metrics)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("tp(2)", "ddp"), ("ddp", "tp(2)"), ("tp(2)", "single"), ("tp(2)", "pp(2)")),
        *(("ddp + tp(2)", "tp(2) + pp(2)"), ("tp(2) + pp(2)", "zero(1) + tp(2)")),
        ("zero(1) + tp(2)", "tp(4)"),
    ],
)
def test_what_one_strategy_saved_another_loads(
    world: World, tmp_path: Path, first: str, second: str
) -> None:
    assert_another_goes_on(world, tmp_path / "saved", first, second, partial(gpt, 2))


class WordLstm(nn.Module):
    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.flatten(1) * 3).long().abs() % 9
        logits: Tensor = self.head(self.lstm(self.words(ids))[0].mean(1))
        return logits


class PatchTransformer(nn.Module):
    """A convolution makes the tokens of a transformer."""

    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 2, 2), nn.BatchNorm2d(8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "tp(2)"),
        (4, "ddp + tp(2)"),
        pytest.param(4, "zero(3) + tp(2)", marks=pytest.mark.whole),
        pytest.param(4, "tp(2) + pp(2)", marks=pytest.mark.whole),
        pytest.param(2, "tp(2, sequence=True)", marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (convnet, "splits nothing of Sequential"),
        (WordLstm, "whole (LSTM,"),
        (PatchTransformer, "whole: Conv2d,"),
    ],
)
def test_convolutions_and_lstms_stay_whole(
    world: World,
    size: int,
    strategy: str,
    make: Callable[[], nn.Module],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_equal(world, size, strategy, make, samples(24, (1, 4, 4)), 8, clip_norm=1.0)
    assert told in capsys.readouterr().err


PLAN = 'tp(2, plan={{"{}": "{}"}})'.format


@pytest.mark.parametrize(
    ("strategy", "make", "options", "said"),
    [
        (PLAN("blocks.*.no", "row"), gpt, {}, "'blocks.*.no', and GPT has no such module"),
        (PLAN("norm", "row"), gpt, {}, 'splits norm by "row", and it is a LayerNorm'),
        (PLAN("tokens", "column"), gpt, {}, 'an nn.Embedding is split by "row"'),
        (
            *(PLAN("0", "column"), lambda: nn.Sequential(nn.Linear(6, 1)), {}),
            "cannot split 0: it has 1 features for 2 ranks",
        ),
        (
            *(PLAN("0.out_proj", "row"), lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), {}),
            "belongs to an nn.MultiheadAttention: leave it out",
        ),
        ("tp(2)", gpt, {"exact": True}, "exact=True adds in the order of one worker"),
        ('gossip(mode="async") + tp(2)', gpt, {}, 'gossip(mode="async") + tp(2) is not built yet'),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    world: World, strategy: str, make: Any, options: dict[str, Any], said: str
) -> None:
    assert said in refused(world, 2, strategy, make, **options)


class MaskedLanguageModel(nn.Module):
    """As BERT's head: its bias is a parameter of the head and of the decoder inside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6)
        self.decoder = nn.Linear(6, 11)
        self.bias = self.decoder.bias
        self.decoder.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.words(ids).tanh())
        return logits


def test_a_bias_that_two_modules_have_is_split_once(world: World) -> None:
    ids = torch.arange(96).view(16, 6) % 11
    loss = lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())  # noqa: E731
    data = TensorDataset(ids, ids.roll(1, 1))
    assert_equal(world, 2, "tp(2)", MaskedLanguageModel, data, loss=loss)
