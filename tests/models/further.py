"""Models with less usual forwards: recurrences, latents, matched boxes, steps of diffusion."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.language import (
    ENCODER,
    GROUPED,
    LENGTH,
    NO_DROPOUT,
    WORDS,
    build,
    causal,
    labelled_text,
    text,
)
from tests.models.vision import own, pixels
from tests.models.zoo import Entry, import_torchvision, logits_loss, token_loss


def diffusers_model(name: str, **sizes: Any) -> nn.Module:
    import_torchvision()
    import diffusers

    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**sizes)
    return model.train()


def images(size: int, n: int) -> tuple[Any, Tensor]:
    inputs, classes = pixels((size, size), n)
    return {"pixel_values": inputs}, classes


def masks(n: int) -> tuple[Any, Tensor]:
    inputs, _ = images(32, n)
    return inputs, (inputs["pixel_values"].sum(1) > 0).long()[:, ::2, ::2]


def noise(channels: int, n: int, **more: Any) -> tuple[Any, Tensor]:
    """Latents at a step of diffusion, and the noise that a model has to find."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, n, channels, 8, 8, generator=generator)
    steps = torch.randint(0, 1000, (n,), generator=generator)
    if "text" in more:
        more = {"encoder_hidden_states": torch.randn(n, LENGTH, 32, generator=generator)}
    else:
        more = {"class_labels": steps % 3}
    name = "sample" if "encoder_hidden_states" in more else "hidden_states"
    return {name: latents[0], "timestep": steps, **more}, latents[1]


def noise_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs["sample"], targets)


def box_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of DETR without the matching: each query has its class."""
    logits = outputs["logits"]
    classes = targets[:, None].expand(logits.shape[:2])
    found = F.cross_entropy(logits.flatten(0, 1), classes.flatten())
    return found + outputs["pred_boxes"].square().mean()


class Siamese(nn.Module):
    """Both pictures go through one encoder, before and behind other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 32))
        self.between = nn.Linear(32, 32)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.flatten(1).chunk(2, 1)
        first = self.between(self.encoder(one))
        second = self.encoder(two + first[:, :1])
        logits: Tensor = self.head(torch.cat([first, second], 1))
        return logits


SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]},
    **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4]},
    **{"mlp_ratios": [2, 2], "decoder_hidden_size": 16, "drop_path_rate": 0.0, "num_labels": 2},
    **{"classifier_dropout_prob": 0.0, **NO_DROPOUT},
}
RWKV = {
    **{"vocab_size": WORDS, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 4},
    **{"intermediate_size": 64, "context_length": 64, "use_cache": False},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
PERCEIVER = {
    **{"num_latents": 8, "d_latents": 32, "d_model": 16, "num_blocks": 2, "vocab_size": WORDS},
    **{"num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_labels": 3},
    **{"num_cross_attention_heads": 4, "max_position_embeddings": 64},
    **{"attention_probs_dropout_prob": 0.0},
}
DETR = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 4, "num_labels": 3},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
}
DIT = {
    **{"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4},
    **{"sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
}
UNET = {
    **{"sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (16, 32)},
    **{"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "layers_per_block": 1},
    **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32},
    **{"attention_head_dim": 4, "norm_num_groups": 4},
}


def detr() -> nn.Module:
    import_torchvision()
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    return build(
        "DetrForObjectDetection", backbone_config=backbone, use_timm_backbone=False, **DETR
    )


def checkpointed(name: str, **sizes: Any) -> nn.Module:
    model = build(name, **sizes)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


FURTHER = {
    "llama-checkpointed": Entry(
        partial(checkpointed, "LlamaForCausalLM", **GROUPED), text, token_loss
    ),
    "bert-checkpointed": Entry(
        partial(checkpointed, "BertForSequenceClassification", num_labels=3, **ENCODER),
        labelled_text,
        logits_loss,
    ),
    "segformer": Entry(
        partial(build, "SegformerForSemanticSegmentation", **SEGFORMER), masks, logits_loss
    ),
    "rwkv": causal("RwkvForCausalLM", **RWKV),
    "perceiver": Entry(
        partial(build, "PerceiverForSequenceClassification", **PERCEIVER),
        labelled_text,
        logits_loss,
    ),
    "detr": Entry(detr, partial(images, 32), box_loss),
    "dit": Entry(
        partial(diffusers_model, "DiTTransformer2DModel", **DIT), partial(noise, 4), noise_loss
    ),
    "unet-condition": Entry(
        partial(diffusers_model, "UNet2DConditionModel", **UNET),
        partial(noise, 4, text=True),
        noise_loss,
    ),
    "siamese": Entry(partial(own, Siamese), partial(pixels, (4, 8)), logits_loss),
}
