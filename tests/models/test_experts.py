"""Mixtures of experts of transformers under expert parallelism. Skipped where it is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import BadInput
from tests.conftest import World
from tests.models.zoo import import_torchvision
from tests.splitting import ADAMW, SGD, assert_equal, texts

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it where it is installed
pytestmark = pytest.mark.whole

SIZES = {
    **{"vocab_size": 51, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16},
    **{"num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
}


def build(name: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).train()
    return model


def mixtral(**options: Any) -> nn.Module:
    return build("Mixtral", num_local_experts=4, **options)


def qwen3(**options: Any) -> nn.Module:
    return build("Qwen3Moe", num_experts=8, moe_intermediate_size=12, head_dim=8, **options)


def deepseek() -> nn.Module:
    """The first layer is dense; experts are chosen in groups, beside shared ones."""
    return build(
        "DeepseekV3",
        **{"n_routed_experts": 8, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    )


def gpt_oss() -> nn.Module:
    return build("GptOss", num_local_experts=4, head_dim=8)


class Switch(nn.Module):
    """Encoder and decoder; experts are a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.SwitchTransformersConfig(
            **{"vocab_size": 51, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2},
            **{"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            **{"num_experts": 4, "dropout_rate": 0.0, "router_jitter_noise": 0.0},
        )
        self.model = transformers.SwitchTransformersForConditionalGeneration(config).train()

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False)


def words(n: int) -> TensorDataset:
    return TensorDataset(*(t % 51 for t in texts(n).tensors))


def loss(outputs: Any, targets: Tensor) -> Tensor:
    value = F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
    balance = getattr(outputs, "aux_loss", None)
    return value if balance is None else value + 0.5 * balance


OPTIONS: dict[str, Any] = {"loss": loss, "optimizer": ADAMW, "clip_norm": 0.5}


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek, gpt_oss, Switch])
@pytest.mark.parametrize(("size", "strategy"), [(2, "ep(2)"), (4, "ddp + ep(2)")])
def test_equal_to_one_worker(
    world: World, make: Callable[[], nn.Module], size: int, strategy: str
) -> None:
    assert_equal(world, size, strategy, make, words(14), 6, **OPTIONS)


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek])
@pytest.mark.parametrize("other", ["tp(2)", "pp(2)"])
def test_beside_other_ways_to_split(
    world: World, make: Callable[[], nn.Module], other: str
) -> None:
    options = {**OPTIONS, "optimizer": SGD}  # Adam amplifies rounding where gradients are small
    assert_equal(world, 4, f"ep(2) + {other}", make, words(14), 6, **options)


@pytest.mark.parametrize("make", [mixtral, qwen3])
def test_beside_context_parallelism(world: World, make: Callable[[], nn.Module]) -> None:
    options = {**OPTIONS, "optimizer": SGD}
    assert_equal(world, 4, "ep(2) + cp(2)", make, words(14), 6, **options)


@pytest.mark.parametrize("make", [mixtral, qwen3])
@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (2, "ep(2)"), (4, "ddp + ep(2)")])
def test_load_balancing_losses_are_those_of_the_global_batch(
    world: World, make: Callable[..., nn.Module], size: int, strategy: str
) -> None:
    make = partial(make, output_router_logits=True)
    assert_equal(world, size, strategy, make, words(14), 6, **OPTIONS)


def test_load_balancing_losses_are_refused_under_pp(world: World) -> None:
    make = partial(mixtral, output_router_logits=True)
    with pytest.raises(BadInput, match="router logits of all layers"):
        assert_equal(world, 2, "pp(2)", make, words(14), 6, **OPTIONS)
