"""Speech, time series, states that go on, and pictures of transformers, in small configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.language import (
    BART,
    ENCODER,
    GROUPED,
    NO_DROPOUT,
    SIZES,
    TOKENS,
    WORDS,
    build,
    causal,
    classifier,
    pictures,
    text,
    translation,
)
from tests.models.vision import without_dropout
from tests.models.zoo import Entry, logits_loss, token_loss


def quiet(name: str, **sizes: Any) -> Any:
    """Without dropout, masks and layers that are skipped at random."""
    off = {
        "layerdrop": 0.0,
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
        "apply_spec_augment": False,
    }
    return without_dropout(build(name, **{**off, **sizes}))


def sound(n: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    waves = torch.randn(n, 400, generator=generator)
    return {"input_values": waves}, torch.randint(0, 3, (n,), generator=generator)


def spectra(n: int, bins: int, frames: int, name: str) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, frames, bins, generator=generator)
    return {name: values}, torch.randint(0, 3, (n,), generator=generator)


def spoken(n: int) -> tuple[Any, Any]:
    inputs, targets = translation(n)
    features, _ = spectra(n, 8, 16, "input_features")
    return {**features, "decoder_input_ids": inputs["decoder_input_ids"]}, targets


def future(n: int, channels: int = 3) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, 20, channels, generator=generator)
    return {"past_values": values[:, :16]}, values[:, 16:]


def dated(n: int) -> tuple[Any, Any]:
    """Single series with the features of their moments; the model has its own loss."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, 24, generator=generator)
    moments = torch.randn(n, 24, 2, generator=generator)
    inputs = {
        "past_values": values[:, :20],
        "past_time_features": moments[:, :20],
        "past_observed_mask": torch.ones(n, 20),
        "future_values": values[:, 20:],
        "future_time_features": moments[:, 20:],
    }
    return inputs, values[:, 20:]


def forecast_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs["prediction_outputs"], targets)


def own_loss(outputs: Any, targets: Tensor) -> Tensor:
    loss: Tensor = outputs["loss"]
    return loss


def two_sides(n: int) -> tuple[Any, Any]:
    inputs, _ = text(n)
    return {**inputs, **pictures(n)[0]}, torch.zeros(n)


def close_pairs(outputs: Any, targets: Tensor) -> Tensor:
    """Each caption to its own picture: a sum over samples, unlike a contrastive loss."""
    return 1 - F.cosine_similarity(outputs["text_embeds"], outputs["image_embeds"]).mean()


WAVES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3},
    **{
        "intermediate_size": 64,
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 4),
    },
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    **{"num_feat_extract_layers": 2, "classifier_proj_size": 16, "feat_proj_dropout": 0.0},
}
AST = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3},
    **{"intermediate_size": 64, "patch_size": 4, "frequency_stride": 4, "time_stride": 4},
    **{"max_length": 16, "num_mel_bins": 8, **NO_DROPOUT},
}
SPEECH_TO_TEXT = {
    **{**BART, "input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 2},
    **{"max_source_positions": 64, "max_target_positions": 64},
}
PATCHES = {
    **{"num_input_channels": 3, "context_length": 16, "prediction_length": 4, "patch_length": 4},
    **{"patch_stride": 4, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"ffn_dim": 64, "loss": "mse", "scaling": "std"},
}
SERIES = {
    **{"prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 4], "input_size": 1},
    **{"num_time_features": 2, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64},
}
MAMBA = {
    **{"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **TOKENS},
    **{"time_step_rank": 4, "use_cache": False},
}
MAMBA2 = {
    **{"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **TOKENS},
    **{"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "use_cache": False},
}
CLIP = {
    "text_config": {**SIZES, **TOKENS},
    "vision_config": {**SIZES, "image_size": 16, "patch_size": 4},
    "projection_dim": 16,
}
LONG = {**ENCODER, "attention_window": 4}

SIGNALS = {
    "wav2vec2": Entry(
        partial(quiet, "Wav2Vec2ForSequenceClassification", **WAVES), sound, logits_loss
    ),
    "hubert": Entry(partial(quiet, "HubertForSequenceClassification", **WAVES), sound, logits_loss),
    "wavlm": Entry(partial(quiet, "WavLMForSequenceClassification", **WAVES), sound, logits_loss),
    "data2vec-audio": Entry(
        partial(quiet, "Data2VecAudioForSequenceClassification", **WAVES), sound, logits_loss
    ),
    "ast": Entry(
        partial(quiet, "ASTForAudioClassification", **AST),
        partial(spectra, bins=8, frames=16, name="input_values"),
        logits_loss,
    ),
    "speech-to-text": Entry(
        partial(quiet, "Speech2TextForConditionalGeneration", **SPEECH_TO_TEXT), spoken, token_loss
    ),
    "patchtst": Entry(partial(quiet, "PatchTSTForPrediction", **PATCHES), future, forecast_loss),
    "patchtst-batchnorm-off": Entry(
        partial(quiet, "PatchTSTForPrediction", norm_type="layernorm", **PATCHES),
        future,
        forecast_loss,
    ),
    "patchtsmixer": Entry(
        partial(quiet, "PatchTSMixerForPrediction", num_layers=2, **PATCHES), future, forecast_loss
    ),
    "time-series-transformer": Entry(
        partial(quiet, "TimeSeriesTransformerForPrediction", **SERIES), dated, own_loss
    ),
    "informer": Entry(
        partial(quiet, "InformerForPrediction", sampling_factor=8, **SERIES), dated, own_loss
    ),
    "mamba": causal("MambaForCausalLM", **MAMBA),
    "mamba2": causal("Mamba2ForCausalLM", **MAMBA2),
    "recurrent-gemma": causal(
        "RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=8, head_dim=8, **GROUPED
    ),
    "fnet": causal("FNetForMaskedLM", **SIZES, hidden_dropout_prob=0.0, pad_token_id=0),
    "longformer": classifier("LongformerForSequenceClassification", **LONG),
    "big-bird": classifier(
        "BigBirdForSequenceClassification", attention_type="original_full", **ENCODER
    ),
    "clip": Entry(partial(quiet, "CLIPModel", **CLIP), two_sides, close_pairs),
}
