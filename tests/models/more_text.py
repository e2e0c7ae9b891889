"""More text models of transformers: other attentions, biases, norms, and shared layers."""

from __future__ import annotations

from functools import partial

from tests.models.language import (
    BART,
    GPT2,
    GROUPED,
    NO_DROPOUT,
    SIZES,
    TOKENS,
    WORDS,
    build,
    causal,
    translation,
)
from tests.models.zoo import Entry, token_loss

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
    "mpnet": causal("MPNetForMaskedLM", **ENCODER),
    "xlnet": causal("XLNetLMHeadModel", **XLNET),
    "funnel": causal("FunnelForMaskedLM", **FUNNEL, activation_dropout=0.0),
    "mbart": pairs("MBartForConditionalGeneration"),
    "pegasus": pairs("PegasusForConditionalGeneration"),
    "marian": pairs("MarianMTModel"),
}
