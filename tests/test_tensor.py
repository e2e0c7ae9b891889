"""Tensor parallelism trains the model that one worker trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.commands.examples.gpt import GPT, Size, next_token_loss
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import convnet, samples
from tests.products import few_or_all
from tests.seeds import seeded
from tests.splitting import (
    GPT_OPTIONS,
    SGD,
    assert_equal,
    gpt,
    mlp,
    model,
    on_workers,
    refused,
    saved_bytes,
    texts,
    workers,
)


@pytest.mark.parametrize("size", [2, 4])
def test_an_mlp_whose_widths_are_not_divided_evenly(world: World, size: int) -> None:
    assert_equal(world, size, f"tp({size})", mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.parametrize("options", [GPT_OPTIONS, {**GPT_OPTIONS, "optimizer": SGD}])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gpt_with_tied_embedding(world: World, size: int, options: dict[str, Any]) -> None:
    """It has 2 heads: on 3 and 4 workers its attention is whole on each."""
    assert_equal(world, size, f"tp({size})", partial(gpt, 2), texts(16), 8, **options)


@pytest.mark.parametrize("size", [2, *few_or_all([], [3])])
def test_positions_are_shared_out_between_the_layers(world: World, size: int) -> None:
    """Micro-batches of 3 and 2 windows of 5: as many positions as no size divides."""
    strategy = f"tp({size}, sequence=True)"
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
        return self.head(x if self.batch_first else x.transpose(0, 1))


@pytest.mark.parametrize("strategy", ["tp(2)", "tp(2, sequence=True)"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_layers(world: World, batch_first: bool, strategy: str) -> None:
    data = TensorDataset(*(t % 11 for t in texts(16).tensors))
    make = partial(Encoder, batch_first, not batch_first)
    assert_equal(world, 2, strategy, make, data, 8, loss=next_token_loss)


@model(attention=lambda: nn.MultiheadAttention(8, 4, kdim=6, vdim=5, batch_first=True), last=(8, 3))
def attending(self: Any, x: Tensor) -> Tensor:
    """Looks at another sequence, and returns the weights of its attention, too."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    options = {"attn_mask": mask, "average_attn_weights": self.average}
    out, weights = self.attention(x[..., :8], x[..., 2:8], x[..., 3:8], **options)
    total = weights.square().sum((-1, -2)).view(len(x), -1).sum(1, keepdim=True)
    return self.last(out).mean(1) + total * torch.arange(3.0)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("strategy", ["tp(2)", "tp(3)", "tp(2, sequence=True)"])
def test_multihead_attention(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str, average: bool
) -> None:
    monkeypatch.setattr(attending, "average", average, raising=False)
    assert_equal(world, workers(strategy), strategy, attending, samples(16, (5, 8)), 8)


@model(first=(6, 5), gate=(5, 7), up=(5, 7), down=(7, 6), head=(6, 3))
def gated(self: Any, x: Tensor) -> Tensor:
    """Two layers that read the same input, and one that reads their product."""
    x = torch.tanh(self.first(x))
    return self.head(self.down(F.silu(self.gate(x)) * self.up(x)))


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
        assert_equal(world, 2, strategy, gated, samples(20), 8, clip_norm=0.1)


def test_every_worker_holds_near_half_of_the_parameters(world: World) -> None:
    whole = sum(p.numel() for p in gpt(2).parameters())

    def held(job: Job, step: Step) -> int:
        most = step.flat.data.nbytes
        assert all(p.untyped_storage().nbytes() <= most for p in step.flat.params)
        return sum(p.numel() for p in step.flat.params)

    # norms, positions and the biases behind row layers are on both
    for part in on_workers(world, "tp(2)", partial(gpt, 2), held):
        assert 0.5 < part / whole < 0.6


def test_layers_that_are_not_split_stay_the_same_bit_for_bit(world: World) -> None:
    def body(job: Job, step: Step) -> dict[str, Tensor]:
        for batch in job.batches(texts(32), 8):
            step(batch)
        specs = step.shard.tensor.specs
        return {n: p.detach().clone() for n, p in step.flat.named if n not in specs}

    first, *others = on_workers(world, "tp(4)", partial(gpt, 2), body, **GPT_OPTIONS)
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

    def backward(model: nn.Module) -> int:
        return saved_bytes(model, lambda: next_token_loss(model(tokens), tokens).backward())

    alone = backward(make())
    for strategy, share in (("tp(2)", 0.7), ("tp(2, sequence=True)", 0.5)):
        for kept in on_workers(world, strategy, make, lambda job, step: backward(step.model)):
            assert share - 0.05 < kept / alone < share + 0.05


@model(
    words=lambda: nn.Embedding(9, 5),
    lstm=lambda: nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True),
    head=(14, 3),
)
def word_lstm(self: Any, x: Tensor) -> Tensor:
    return self.head(self.lstm(self.words((x.flatten(1) * 3).long().abs() % 9))[0].mean(1))


@model(
    stem=lambda: nn.Sequential(nn.Conv2d(1, 8, 2, 2), nn.BatchNorm2d(8)),
    encoder=lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
    head=(8, 3),
)
def patch_transformer(self: Any, x: Tensor) -> Tensor:
    """A convolution makes the tokens of a transformer."""
    return self.head(self.encoder(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize(
    "strategy",
    [
        *("tp(2)", "ddp + tp(2)"),
        *few_or_all([], ["zero(3) + tp(2)", "tp(2) + pp(2)", "tp(2, sequence=True)"]),
    ],
)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (convnet, "splits nothing of Sequential"),
        (word_lstm, "whole (LSTM,"),
        (patch_transformer, "whole: Conv2d,"),
    ],
)
def test_convolutions_and_lstms_stay_whole(
    world: World, strategy: str, make: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = samples(24, (1, 4, 4))
    assert_equal(world, workers(strategy), strategy, make, data, 8, clip_norm=1.0)
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

    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.decoder = nn.Linear(6, 11)
        self.bias = self.decoder.bias
        self.decoder.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.words(ids).tanh())


def test_a_bias_that_two_modules_have_is_split_once(world: World) -> None:
    ids = torch.arange(96).view(16, 6) % 11
    data = TensorDataset(ids, ids.roll(1, 1))
    assert_equal(world, 2, "tp(2)", MaskedLanguageModel, data, loss=next_token_loss)
