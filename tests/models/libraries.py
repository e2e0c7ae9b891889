"""Small models of diffusers, segmentation_models_pytorch, torch_geometric, x-transformers, peft."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.language import GPT2, GROUPED, WORDS, build, text
from tests.models.vision import masks, pixels, without_dropout, words
from tests.models.zoo import Entry, import_torchvision, logits_loss, token_loss


def sampled_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The squared error of `sample`, or of a plain tensor."""
    found = outputs if isinstance(outputs, Tensor) else outputs[0]
    return F.mse_loss(found, targets)


def noisy(n: int, channels: int = 4, size: int = 8, **beside: tuple[int, ...]) -> tuple[Any, Any]:
    """Noisy pictures with their time steps, and what else a denoiser is given."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "sample": torch.randn(n, channels, size, size, generator=generator),
        "timestep": torch.randint(0, 1000, (n,), generator=generator),
    }
    for name, shape in beside.items():
        inputs[name] = torch.randn(n, *shape, generator=generator)
    return inputs, torch.randn(n, channels, size, size, generator=generator)


def hidden(n: int, **beside: tuple[int, ...]) -> tuple[Any, Any]:
    inputs, targets = noisy(n, **beside)
    return {"hidden_states": inputs.pop("sample"), **inputs}, targets


def pictures(n: int) -> tuple[Any, Any]:
    inputs, _ = pixels((16, 16), n)
    return inputs, inputs


def diffuser(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    torch.manual_seed(0)
    return without_dropout(getattr(import_module("diffusers"), name)(**options))


def segmenter(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    models = import_module("segmentation_models_pytorch")
    torch.manual_seed(0)
    chosen = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2, **options}
    return without_dropout(getattr(models, name)(**chosen))


NODES = 6


class GraphClassifier(nn.Module):
    """Convolutions of torch_geometric over the graphs of a batch as one, and their mean."""

    def __init__(self, kind: str, norm: bool = False, **options: Any):
        super().__init__()
        convolution = getattr(import_module("torch_geometric.nn"), kind)
        self.convolutions = nn.ModuleList(
            [convolution(5, 16, **options), convolution(16, 16, **options)]
        )
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.head = nn.Linear(16, 3)
        ring = torch.arange(NODES)
        edges = torch.stack([ring, (ring + 1) % NODES])
        self.register_buffer("edges", torch.cat([edges, edges.flip(0), edges[:, :2] // 2], 1))

    def forward(self, nodes: Tensor) -> Tensor:  # (graphs, NODES, 5)
        first = NODES * torch.arange(len(nodes))
        edges = (self.edges[:, None] + first[None, :, None]).flatten(1)
        x = nodes.flatten(0, 1)
        for convolution in self.convolutions:
            x = torch.relu(self.norm(convolution(x, edges)))
        out: Tensor = self.head(x.unflatten(0, (-1, NODES)).mean(1))
        return out


class DenseGraphs(nn.Module):
    """Two dense convolutions with their adjacency from the features."""

    def __init__(self, kind: str):
        super().__init__()
        convolution = getattr(import_module("torch_geometric.nn"), kind)
        self.first, self.second = convolution(5, 16), convolution(16, 3)

    def forward(self, nodes: Tensor) -> Tensor:
        joined = (torch.cdist(nodes, nodes) < 2.5).to(nodes.dtype)
        out: Tensor = self.second(torch.relu(self.first(nodes, joined)), joined).mean(1)
        return out


def graphs(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(n, NODES, 5, generator=generator)
    return nodes, torch.randint(0, 3, (n,), generator=generator)


def seeded_model(build_one: Any, *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return without_dropout(build_one(*args, **options))


def x_transformer(kind: str, **options: Any) -> nn.Module:
    library = import_module("x_transformers")
    torch.manual_seed(0)
    layers = getattr(library, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    return library.TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers).train()


def x_vit() -> nn.Module:
    library = import_module("x_transformers")
    torch.manual_seed(0)
    layers = library.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    wrapped = library.ViTransformerWrapper
    return wrapped(image_size=16, patch_size=4, num_classes=3, attn_layers=layers).train()


def x_series() -> nn.Module:
    library = import_module("x_transformers")
    torch.manual_seed(0)
    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    wrapped = library.ContinuousTransformerWrapper
    return wrapped(dim_in=5, dim_out=5, max_seq_len=32, attn_layers=layers).train()


def series(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, NODES + 1, 5, generator=generator)
    return values[:, :-1], values[:, 1:]


def adapted(
    name: str, sizes: dict[str, Any], kind: str = "LoraConfig", **options: Any
) -> nn.Module:
    import_torchvision()
    peft = import_module("peft")
    torch.manual_seed(0)
    model: nn.Module = peft.get_peft_model(build(name, **sizes), getattr(peft, kind)(**options))
    for parameter in model.parameters():  # B of LoRA begins at zero, where A has no gradient
        if parameter.requires_grad and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model.train()


UNET = {
    **{"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8},
    **{"in_channels": 4, "out_channels": 4, "sample_size": 8},
}
ATTENTION = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
PIXART = {
    **{**ATTENTION, "in_channels": 4, "out_channels": 4, "patch_size": 2, "caption_channels": 16},
    **{
        "cross_attention_dim": 32,
        "norm_type": "ada_norm_single",
        "use_additional_conditions": False,
    },
}
SD3 = {
    **{"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8},
    **{"patch_size": 2, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 16},
    **{"caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8},
}
KL = {
    **{"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8},
    **{
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    **{"latent_channels": 4, "sample_size": 16},
}
THREE = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}

DIFFUSERS = {
    "unet2d": Entry(
        partial(
            diffuser,
            "UNet2DModel",
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            **UNET,
        ),
        noisy,
        sampled_loss,
    ),
    "pixart": Entry(
        partial(diffuser, "PixArtTransformer2DModel", **PIXART),
        partial(hidden, encoder_hidden_states=(5, 16)),
        sampled_loss,
    ),
    "sd3": Entry(
        partial(diffuser, "SD3Transformer2DModel", **SD3),
        partial(hidden, encoder_hidden_states=(5, 16), pooled_projections=(16,)),
        sampled_loss,
    ),
    "autoencoder-kl": Entry(partial(diffuser, "AutoencoderKL", **KL), pictures, sampled_loss),
}

SEGMENTATION = {
    f"smp-{name.lower()}": Entry(
        partial(segmenter, name, **options),
        partial(masks, 64 if name == "FPN" else 32),  # its GroupNorm needs several values a group
        F.cross_entropy,
    )
    for name, options in {
        "Unet": THREE,
        "UnetPlusPlus": THREE,
        "MAnet": THREE,
        "Linknet": {"encoder_depth": 3},
        "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 64},
        "PSPNet": {"encoder_depth": 3, "psp_out_channels": 32},
        "DeepLabV3Plus": {"decoder_channels": 16},
        "Segformer": {"decoder_segmentation_channels": 16},
    }.items()
}

GRAPHS = {
    **{
        f"pyg-{name}": Entry(
            partial(seeded_model, GraphClassifier, kind, **options), graphs, logits_loss
        )
        for name, kind, options in (
            ("gcn", "GCNConv", {}),
            ("sage", "SAGEConv", {}),
            ("gat", "GATConv", {"heads": 4, "concat": False}),
            ("gatv2-norm", "GATv2Conv", {"heads": 4, "concat": False, "norm": True}),
            ("transformer", "TransformerConv", {"heads": 4, "concat": False}),
            ("cheb", "ChebConv", {"K": 2}),
        )
    },
    "pyg-dense": Entry(partial(seeded_model, DenseGraphs, "DenseGCNConv"), graphs, logits_loss),
}

X_TRANSFORMERS = {
    "x-decoder": Entry(partial(x_transformer, "Decoder"), words, token_loss),
    "x-rotary-glu": Entry(
        partial(x_transformer, "Decoder", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
        words,
        token_loss,
    ),
    "x-grouped": Entry(
        partial(x_transformer, "Decoder", attn_kv_heads=2, alibi_pos_bias=True), words, token_loss
    ),
    "x-encoder": Entry(
        partial(x_transformer, "Encoder", attn_qk_norm=True, sandwich_norm=True), words, token_loss
    ),
    "x-vit": Entry(x_vit, partial(pixels, (16, 16)), logits_loss),
    "x-series": Entry(x_series, series, sampled_loss),
}

PEFT = {
    "lora-llama": Entry(
        partial(adapted, "LlamaForCausalLM", GROUPED, r=4, target_modules=["q_proj", "v_proj"]),
        text,
        token_loss,
    ),
    "lora-gpt2": Entry(
        partial(
            adapted, "GPT2LMHeadModel", GPT2, r=4, target_modules=["c_attn"], fan_in_fan_out=True
        ),
        text,
        token_loss,
    ),
    "dora-llama": Entry(
        partial(
            adapted, "LlamaForCausalLM", GROUPED, r=4, use_dora=True, target_modules=["o_proj"]
        ),
        text,
        token_loss,
    ),
    "ia3-llama": Entry(
        partial(
            adapted,
            "LlamaForCausalLM",
            GROUPED,
            "IA3Config",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
        text,
        token_loss,
    ),
}

LIBRARIES = {**DIFFUSERS, **SEGMENTATION, **GRAPHS, **X_TRANSFORMERS, **PEFT}
