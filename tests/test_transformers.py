"""Hugging Face's models, split. Skipped where transformers is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.replica.tensor.plan import plan_of
from shoal.strategy.split_terms import Tp
from tests.conftest import World
from tests.models.catalog import CATALOG
from tests.models.zoo import import_torchvision
from tests.splitting import ADAMW, SGD, assert_equal, texts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_NAMES = (
    "llama llama-tied llama-1-key-head llama-classifier qwen2 qwen3 mistral gemma2 gemma3 phi3 "
    "mixtral qwen3-moe gpt-neox olmo olmo2 gpt-j bloom falcon-new opt bert bert-mlm roberta "
    "distilbert t5 t5-gated bart whisper gpt2 vit"
)
MODELS = _NAMES.split()
# norms over all heads, biases of all heads, and one that has an adapter of its own
NOT_BY_HEADS = ("olmo2", "bloom", "gpt2")


def gpt2() -> nn.Module:
    """Three heads, which two workers do not divide; nothing is downloaded."""
    import_torchvision()  # transformers imports it where it is installed
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{"vocab_size": 51, "n_positions": 8, "n_embd": 12, "n_layer": 3, "n_head": 3},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


def words(n: int) -> TensorDataset:
    return TensorDataset(*(t % 51 for t in texts(n).tensors))


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten())


def test_roles_of_gpt2() -> None:
    roles = {name: role.kind for name, role in plan_of(gpt2(), Tp(2)).items()}
    assert {kind for name, kind in roles.items() if name.endswith(("c_attn", "c_fc"))} == {"column"}
    assert {kind for name, kind in roles.items() if name.endswith("c_proj")} == {"row"}
    assert roles["transformer.wte"] == "vocabulary" and roles["lm_head"] == "column"
    assert len(roles) == 4 * 3 + 2


@pytest.mark.parametrize("strategy", ["tp(2)", "tp(3)", "tp(2, sequence=True)", "pp(2)"])
def test_gpt2_trains_as_on_one_worker(world: World, strategy: str) -> None:
    size = int(strategy[3])
    options = {"loss": loss, "optimizer": ADAMW, "clip_norm": 1.0}
    assert_equal(world, size, strategy, gpt2, words(16), 8, **options)


@pytest.mark.whole
@pytest.mark.parametrize("name", MODELS)
def test_an_attention_is_split_by_heads(name: str) -> None:
    kinds = {role.kind for role in plan_of(CATALOG[name].build(), Tp(2)).values()}
    assert {"column", "row"} <= kinds
    assert ("heads" in kinds) == (name not in NOT_BY_HEADS)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["tp(2)", "tp(4)", "ddp + tp(2)"])
@pytest.mark.parametrize("name", MODELS)
def test_each_trains_as_on_one_worker(world: World, name: str, strategy: str) -> None:
    entry = CATALOG[name]
    size = 2 if strategy == "tp(2)" else 4
    options: dict[str, Any] = {"loss": entry.loss, "optimizer": SGD, "clip_norm": 1.0}
    assert_equal(world, size, strategy, entry.build, entry.dataset(12), 4, **options)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["bert-mlm", "deberta-v2"])
def test_a_bias_with_two_names_is_split_beside_stages(world: World, name: str) -> None:
    entry = CATALOG[name]
    options: dict[str, Any] = {"loss": entry.loss, "optimizer": SGD}
    assert_equal(world, 4, "tp(2) + pp(2)", entry.build, entry.dataset(12), 4, **options)
