"""Small models of Hugging Face's transformers, built from configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

transformers: Any
try:
    import transformers
except ImportError:
    transformers = None

WORDS = 51
LENGTH = 7

DECODER = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 16, "use_cache": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
ENCODER = {
    **{"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 16, "pad_token_id": 0},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
T5 = {
    **{"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 26, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0},
}
BART = {
    **{"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 26},
    **{"decoder_ffn_dim": 26, "max_position_embeddings": 16, "use_cache": False, "dropout": 0.0},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
DROPLESS = {"attention_dropout": 0.0, "activation_dropout": 0.0, "hidden_dropout": 0.0}


def model_of(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        settings = getattr(transformers, config)(**options)
        model: nn.Module = getattr(transformers, kind)(settings).train()
        return model

    return make


# by name: how to build it, and what it is trained on
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (model_of("LlamaForCausalLM", "LlamaConfig", **GROUPED), "words"),
    "llama tied": (
        model_of("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True),
        "words",
    ),
    "llama one key head": (
        model_of("LlamaForCausalLM", "LlamaConfig", **DECODER, num_key_value_heads=1),
        "words",
    ),
    "llama classifier": (
        model_of("LlamaForSequenceClassification", "LlamaConfig", **GROUPED, num_labels=5),
        "classes",
    ),
    "qwen2": (model_of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), "words"),
    "qwen3": (model_of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=6), "words"),
    "mistral": (model_of("MistralForCausalLM", "MistralConfig", **GROUPED), "words"),
    "gemma2": (model_of("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=6), "words"),
    "gemma3": (model_of("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=6), "words"),
    "phi3": (model_of("Phi3ForCausalLM", "Phi3Config", **GROUPED), "words"),
    "mixtral": (
        model_of(
            "MixtralForCausalLM",
            "MixtralConfig",
            **{**GROUPED, "num_local_experts": 3, "intermediate_size": 24},
        ),
        "words",
    ),
    "qwen3 moe": (
        model_of(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **{**GROUPED, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
        "words",
    ),
    "gpt-neox": (model_of("GPTNeoXForCausalLM", "GPTNeoXConfig", **DECODER), "words"),
    "olmo": (model_of("OlmoForCausalLM", "OlmoConfig", **GROUPED), "words"),
    "olmo2": (model_of("Olmo2ForCausalLM", "Olmo2Config", **GROUPED), "words"),
    "gpt-j": (
        model_of(
            "GPTJForCausalLM",
            "GPTJConfig",
            **{"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16},
            **{"rotary_dim": 4, "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
            **{"attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "words",
    ),
    "bloom": (
        model_of(
            "BloomForCausalLM",
            "BloomConfig",
            **{"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 4},
            **{"use_cache": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        ),
        "words",
    ),
    "falcon": (
        model_of(
            "FalconForCausalLM",
            "FalconConfig",
            **{**DECODER, "num_kv_heads": 2, "new_decoder_architecture": True},
        ),
        "words",
    ),
    "opt": (
        model_of(
            "OPTForCausalLM",
            "OPTConfig",
            **{"vocab_size": WORDS, "hidden_size": 16, "ffn_dim": 26, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "max_position_embeddings": 16, "use_cache": False},
            **{"dropout": 0.0, "word_embed_proj_dim": 16, "pad_token_id": 0},
        ),
        "words",
    ),
    "bert classifier": (
        model_of("BertForSequenceClassification", "BertConfig", **ENCODER, num_labels=5),
        "classes",
    ),
    "bert": (model_of("BertForMaskedLM", "BertConfig", **ENCODER), "words"),
    "roberta": (model_of("RobertaForMaskedLM", "RobertaConfig", **ENCODER), "words"),
    "distilbert": (
        model_of(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            **{"vocab_size": WORDS, "dim": 16, "hidden_dim": 26, "n_layers": 2, "n_heads": 4},
            **{"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 16},
        ),
        "words",
    ),
    "t5": (model_of("T5ForConditionalGeneration", "T5Config", **T5), "pairs"),
    "t5 gated": (
        model_of(
            "T5ForConditionalGeneration",
            "T5Config",
            **{**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        "pairs",
    ),
    "bart": (model_of("BartForConditionalGeneration", "BartConfig", **BART), "pairs"),
    "whisper": (
        model_of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **{**BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        ),
        "sounds",
    ),
    "gpt2": (
        model_of(
            "GPT2LMHeadModel",
            "GPT2Config",
            **{"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
            **{"bos_token_id": 0, "eos_token_id": 0},
        ),
        "words",
    ),
    "vit": (
        model_of(
            "ViTForImageClassification",
            "ViTConfig",
            **{"hidden_size": 16, "intermediate_size": 26, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_labels": 5},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        "images",
    ),
}


class Samples(torch.utils.data.Dataset[Any]):
    """Inputs by name, and targets."""

    def __init__(self, kind: str, n: int):
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(3, WORDS, (n, LENGTH), generator=generator)
        inputs = {"input_ids": words}
        self.targets = words.roll(-1, 1)
        if kind == "pairs":
            inputs["decoder_input_ids"] = words.roll(1, 1)
        if kind == "sounds":
            inputs = {
                "input_features": torch.randn(n, 8, 16, generator=generator),
                "decoder_input_ids": words,
            }
        if kind == "images":
            inputs = {"pixel_values": torch.randn(n, 3, 8, 8, generator=generator)}
        if kind in ("images", "classes"):
            self.targets = torch.randint(0, 5, (n,), generator=generator)
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        return {name: values[i] for name, values in self.inputs.items()}, self.targets[i]


def loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs["logits"]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.flatten())
