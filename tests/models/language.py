"""Small configurations of transformers' models, with random weights: nothing is downloaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models.zoo import Entry, import_torchvision, logits_loss, token_loss

WORDS = 96
LENGTH = 16
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


def build(name: str, **sizes: Any) -> nn.Module:
    """The model class `name` of transformers, from a small configuration."""
    import_torchvision()  # transformers imports it where it is installed
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**sizes))
    return model.train()


def text(n: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, WORDS, (n, LENGTH + 1), generator=generator)
    return {"input_ids": words[:, :-1]}, words[:, 1:]


def labelled_text(n: int) -> tuple[Any, Any]:
    inputs, targets = text(n)
    return inputs, targets[:, 0] % 3


def translation(n: int) -> tuple[Any, Any]:
    inputs, targets = text(n)
    return {**inputs, "decoder_input_ids": inputs["input_ids"].flip(1)}, targets


def speech(n: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = text(n)
    sound = torch.randn(n, 8, 2 * LENGTH, generator=generator)
    return {"input_features": sound, "decoder_input_ids": inputs["input_ids"]}, targets


def pictures(n: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(n, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels}, torch.randint(0, 3, (n,), generator=generator)


def causal(name: str, **sizes: Any) -> Entry:
    return Entry(partial(build, name, **sizes), text, token_loss)


def classifier(name: str, **sizes: Any) -> Entry:
    return Entry(partial(build, name, num_labels=3, **sizes), labelled_text, logits_loss)


GPT2 = {
    **{"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **TOKENS},
}
T5 = {
    **{"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0, **TOKENS},
}
BART = {
    **{"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "decoder_start_token_id": 1},
    **TOKENS,
}
WHISPER = {
    **BART,
    **{"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": 64},
}
DISTILBERT = {
    **{"vocab_size": WORDS, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4},
    **{"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    **{"max_position_embeddings": 64, "pad_token_id": 0},
}
OPT = {
    **{"vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    **{"dropout": 0.0, **TOKENS},
}
VIT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 3, **NO_DROPOUT},
}
DEEPSEEK = {
    **SIZES,
    **TOKENS,
    **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}

LANGUAGE = {
    "gpt2": causal("GPT2LMHeadModel", use_cache=False, **GPT2),
    "gpt2-cache": causal("GPT2LMHeadModel", use_cache=True, **GPT2),
    "gpt-neox": causal("GPTNeoXForCausalLM", **SIZES, **TOKENS),
    "opt": causal("OPTForCausalLM", **OPT),
    "llama": causal("LlamaForCausalLM", tie_word_embeddings=False, **GROUPED),
    "llama-tied": causal("LlamaForCausalLM", tie_word_embeddings=True, **GROUPED),
    "llama-1-key-head": causal("LlamaForCausalLM", **{**GROUPED, "num_key_value_heads": 1}),
    "llama-classifier": classifier("LlamaForSequenceClassification", **GROUPED),
    "olmo": causal("OlmoForCausalLM", **GROUPED),
    "qwen2": causal("Qwen2ForCausalLM", **GROUPED),
    "qwen3": causal("Qwen3ForCausalLM", head_dim=8, **GROUPED),
    "mistral": causal("MistralForCausalLM", **GROUPED),
    "gemma2": causal("Gemma2ForCausalLM", head_dim=8, **GROUPED),
    "phi3": causal("Phi3ForCausalLM", **GROUPED),
    "mixtral": causal("MixtralForCausalLM", **GROUPED, **EXPERTS),
    "qwen3-moe": causal("Qwen3MoeForCausalLM", head_dim=8, **GROUPED, **EXPERTS),
    "deepseek-v3": causal("DeepseekV3ForCausalLM", **DEEPSEEK),
    "bert": classifier("BertForSequenceClassification", **SIZES, **NO_DROPOUT, pad_token_id=0),
    "bert-mlm": causal("BertForMaskedLM", **SIZES, **NO_DROPOUT, pad_token_id=0),
    "roberta": classifier(
        "RobertaForSequenceClassification", **SIZES, **NO_DROPOUT, pad_token_id=0
    ),
    "distilbert": classifier("DistilBertForSequenceClassification", **DISTILBERT),
    "t5": Entry(partial(build, "T5ForConditionalGeneration", **T5), translation, token_loss),
    "t5-gated": Entry(
        partial(
            build,
            "T5ForConditionalGeneration",
            **{**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        translation,
        token_loss,
    ),
    "bart": Entry(partial(build, "BartForConditionalGeneration", **BART), translation, token_loss),
    "whisper": Entry(
        partial(build, "WhisperForConditionalGeneration", **WHISPER), speech, token_loss
    ),
    "vit": Entry(partial(build, "ViTForImageClassification", **VIT), pictures, logits_loss),
}


ENCODER = {**SIZES, **NO_DROPOUT, "pad_token_id": 0}
ROTARY = {**GPT2, "rotary_dim": 4}
BLOOM = {
    **{"vocab_size": WORDS, "hidden_size": 32, "n_layer": 4, "n_head": 4, **TOKENS},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
MPT = {"vocab_size": WORDS, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, **TOKENS}
XLNET = {
    **{"vocab_size": WORDS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64},
    **{"dropout": 0.0, **TOKENS},
}
FUNNEL = {
    **{"vocab_size": WORDS, "block_sizes": [2, 2], "num_decoder_layers": 2, "d_model": 32},
    **{"n_head": 4, "d_head": 8, "d_inner": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}
DEBERTA = {
    **{**ENCODER, "relative_attention": True, "position_buckets": 8, "share_att_key": True},
    **{"norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p"},
}
OPT_350M = {
    **{"vocab_size": WORDS, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    **{"max_position_embeddings": 64, "dropout": 0.0, **TOKENS},
}


def pairs(name: str) -> Entry:
    return Entry(partial(build, name, **BART), translation, token_loss)


def nystromformer(option: str = "sample") -> nn.Module:
    """The library starts its iterative inverse from the largest sum of the batch ("original").

    So the result depends on how batches are cut. That of each sample cannot be asked for by its
    configuration, which it reads under another name.
    """
    sizes = {"num_landmarks": 4, "segment_means_seq_len": LENGTH, "conv_kernel_size": 5}
    model = build("NystromformerForMaskedLM", **ENCODER, **sizes)
    for module in model.modules():
        if hasattr(module, "init_option"):
            module.init_option = option
    return model


MORE_TEXT = {
    "bloom": causal("BloomForCausalLM", **BLOOM),
    "falcon": causal("FalconForCausalLM", **SIZES, **TOKENS, multi_query=True),
    "falcon-new": causal(
        "FalconForCausalLM", **SIZES, **TOKENS, num_kv_heads=2, new_decoder_architecture=True
    ),
    "gpt-j": causal("GPTJForCausalLM", **ROTARY),
    "mpt": causal("MptForCausalLM", **MPT),
    "opt-350m": causal("OPTForCausalLM", **OPT_350M),
    "stablelm": causal("StableLmForCausalLM", **GROUPED, use_qkv_bias=True),
    "starcoder2": causal("Starcoder2ForCausalLM", **GROUPED),
    "olmo2": causal("Olmo2ForCausalLM", **GROUPED),
    "nemotron": causal("NemotronForCausalLM", **GROUPED),
    "gemma3": causal("Gemma3ForCausalLM", head_dim=8, **GROUPED),
    "glm4": causal("Glm4ForCausalLM", head_dim=8, **GROUPED),
    "modernbert": causal(
        "ModernBertForMaskedLM", **SIZES, **TOKENS, cls_token_id=1, sep_token_id=2
    ),
    "deberta-v2": causal("DebertaV2ForMaskedLM", **DEBERTA),
    "albert": causal("AlbertForMaskedLM", **ENCODER, embedding_size=16),
    "nystromformer": Entry(nystromformer, text, token_loss),
    "mpnet": causal("MPNetForMaskedLM", **ENCODER),
    "xlnet": causal("XLNetLMHeadModel", **XLNET),
    "funnel": causal("FunnelForMaskedLM", **FUNNEL, activation_dropout=0.0),
    "mbart": pairs("MBartForConditionalGeneration"),
    "pegasus": pairs("PegasusForConditionalGeneration"),
    "marian": pairs("MarianMTModel"),
}
