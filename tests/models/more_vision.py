"""Auxiliary outputs, segmentation, video, and transformers' models of pictures."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.language import NO_DROPOUT, build
from tests.models.language import pictures as named_pictures
from tests.models.vision import picture_entry, pictures, torchvision_model, without_dropout
from tests.models.zoo import Entry, import_torchvision, logits_loss


def segmentation_model(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    from torchvision.models import segmentation

    torch.manual_seed(0)
    kind = getattr(segmentation, name)
    return without_dropout(kind(weights=None, weights_backbone=None, num_classes=3, **options))


def video_resnet() -> nn.Module:
    import_torchvision()
    from torchvision.models.video import resnet

    torch.manual_seed(0)
    convolutions = [resnet.Conv3DSimple] * 4
    model: nn.Module = resnet.VideoResNet(
        resnet.BasicBlock, convolutions, [1, 1, 1, 1], resnet.BasicStem, num_classes=3
    )
    return model.train()


def masks(n: int) -> tuple[Tensor, Tensor]:
    images, _ = pictures(32, n)
    return images, (images.sum(1) > 0).long()


def videos(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, 4, 16, 16, generator=generator),
        torch.randint(0, 3, (n,), generator=generator),
    )


def auxiliary_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of GoogLeNet, which returns a named tuple."""
    first, *others = (F.cross_entropy(each, targets) for each in outputs)
    total: Tensor = first + 0.3 * sum(others)
    return total


def segmentation_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    losses = {name: F.cross_entropy(each, targets) for name, each in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def picture_model(name: str, **sizes: Any) -> Entry:
    return Entry(partial(build, name, num_labels=3, **sizes), named_pictures, logits_loss)


VIT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4, **NO_DROPOUT},
}
SWIN = {
    **{"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    **{"image_size": 16, "patch_size": 2, "drop_path_rate": 0.0, **NO_DROPOUT},
}

MORE_VISION = {
    "densenet": picture_entry(torchvision_model, "densenet121", 32),
    "shufflenet": picture_entry(torchvision_model, "shufflenet_v2_x0_5", 32),
    "mnasnet": picture_entry(torchvision_model, "mnasnet0_5", 32),
    "regnet": picture_entry(torchvision_model, "regnet_y_400mf", 32),
    "googlenet": Entry(
        partial(torchvision_model, "googlenet", aux_logits=True, init_weights=False),
        partial(pictures, 64),
        auxiliary_loss,
    ),
    "deeplabv3": Entry(
        partial(segmentation_model, "deeplabv3_mobilenet_v3_large", aux_loss=True),
        masks,
        segmentation_loss,
    ),
    "lraspp": Entry(
        partial(segmentation_model, "lraspp_mobilenet_v3_large"), masks, segmentation_loss
    ),
    "r3d": Entry(video_resnet, videos, logits_loss),
    "deit": picture_model("DeiTForImageClassification", intermediate_size=64, **VIT),
    "beit": picture_model(
        "BeitForImageClassification", intermediate_size=64, drop_path_rate=0.0, **VIT
    ),
    "dinov2": picture_model("Dinov2ForImageClassification", mlp_ratio=2, **VIT),
    "swin": picture_model("SwinForImageClassification", **SWIN),
    "swinv2": picture_model("Swinv2ForImageClassification", **SWIN),
}
