"""Models of torchvision, timm and transformers for pictures, and own ones: U-Net, LSTM."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.language import LENGTH, NO_DROPOUT, WORDS, build
from tests.models.language import pictures as named_pictures
from tests.models.zoo import Entry, import_torchvision, logits_loss, token_loss


def torchvision_model(name: str, folder: str = "models", **options: Any) -> nn.Module:
    """Of a folder of torchvision such as models.segmentation."""
    import_torchvision()
    models = import_module(f"torchvision.{folder}")
    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)(num_classes=3, **options)
    return without_dropout(model)


def timm_model(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    import timm

    torch.manual_seed(0)
    return without_dropout(timm.create_model(name, num_classes=3, **options))


def without_dropout(model: nn.Module) -> nn.Module:
    """A mask depends on how rows are split over workers, so it cannot equal one device's."""
    for module in model.modules():
        for rate in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model.train()


def pixels(shape: tuple[int, ...], n: int) -> tuple[Tensor, Tensor]:
    """Pictures and videos with their classes."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, *shape, generator=generator),
        torch.randint(0, 3, (n,), generator=generator),
    )


def masks(size: int, n: int) -> tuple[Tensor, Tensor]:
    images, _ = pixels((size, size), n)
    return images, (images.sum(1) > 0).long()


def words(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, WORDS, (n, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def labelled_words(n: int) -> tuple[Tensor, Tensor]:
    text, after = words(n)
    return text, after[:, 0] % 3


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Ronneberger et al., 2015, with three levels."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.down1 = double(3, width)
        self.down2 = double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = double(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        bottom = self.bottom(self.pool(second))
        second = self.merge2(torch.cat([second, self.up2(bottom)], 1))
        first = self.merge1(torch.cat([first, self.up1(second)], 1))
        logits: Tensor = self.head(first)
        return logits


class LstmLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(text))
        logits: Tensor = self.head(states)
        return logits


class GruClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.gru = nn.GRU(32, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 3)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(text))
        logits: Tensor = self.head(states.mean(1))
        return logits


class Seq2Seq(nn.Module):
    """torch's own nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        embedded = self.embedding(text)
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        logits: Tensor = self.head(self.transformer(embedded, embedded, tgt_mask=mask))
        return logits


def own(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def picture_entry(build: Any, name: str, size: int, **options: Any) -> Entry:
    return Entry(partial(build, name, **options), partial(pixels, (size, size)), logits_loss)


def named_entry(name: str, **sizes: Any) -> Entry:
    """Of transformers."""
    return Entry(partial(build, name, num_labels=3, **sizes), named_pictures, logits_loss)


def segmentation_entry(name: str, **options: Any) -> Entry:
    options |= {"folder": "models.segmentation", "weights": None, "weights_backbone": None}
    return Entry(partial(torchvision_model, name, **options), partial(masks, 32), segmentation_loss)


def segmentation_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    losses = {name: F.cross_entropy(each, targets) for name, each in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def auxiliary_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of GoogLeNet, which returns a named tuple."""
    first, *others = (F.cross_entropy(each, targets) for each in outputs)
    total: Tensor = first + 0.3 * sum(others)
    return total


def video_resnet() -> nn.Module:
    import_torchvision()
    from torchvision.models.video import resnet

    torch.manual_seed(0)
    convolutions = [resnet.Conv3DSimple] * 4
    model: nn.Module = resnet.VideoResNet(
        resnet.BasicBlock, convolutions, [1, 1, 1, 1], resnet.BasicStem, num_classes=3
    )
    return model.train()


TORCHVISION_VIT = {
    **{"image_size": 16, "patch_size": 4, "num_layers": 4, "num_heads": 4},
    **{"hidden_dim": 32, "mlp_dim": 64},
}
TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
TIMM_SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
VIT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4, **NO_DROPOUT},
}
SWIN = {
    **{"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    **{"image_size": 16, "patch_size": 2, "drop_path_rate": 0.0, **NO_DROPOUT},
}

VISION = {
    "resnet18": picture_entry(torchvision_model, "resnet18", 32),
    "resnet50": picture_entry(torchvision_model, "resnet50", 32),
    "mobilenet": picture_entry(torchvision_model, "mobilenet_v3_small", 32),
    "efficientnet": picture_entry(torchvision_model, "efficientnet_b0", 32),
    "convnext": picture_entry(torchvision_model, "convnext_tiny", 32),
    "torchvision-vit": picture_entry(torchvision_model, "VisionTransformer", 16, **TORCHVISION_VIT),
    "torchvision-swin": picture_entry(torchvision_model, "swin_t", 32),
    "timm-vit": picture_entry(timm_model, "vit_tiny_patch16_224", 16, **TIMM_VIT),
    "timm-swin": picture_entry(
        timm_model, "swin_tiny_patch4_window7_224", 32, depths=(2, 2), num_heads=(2, 4), **TIMM_SWIN
    ),
    "timm-convnext": picture_entry(timm_model, "convnext_atto", 32),
    "timm-efficientnet": picture_entry(timm_model, "efficientnet_b0", 32),
    "timm-resnetv2": picture_entry(timm_model, "resnetv2_50", 32, layers=(1, 1, 1, 1)),
    "unet": Entry(partial(own, UNet), partial(masks, 16), F.cross_entropy),
    "lstm": Entry(partial(own, LstmLanguageModel), words, token_loss),
    "gru": Entry(partial(own, GruClassifier), labelled_words, logits_loss),
    "nn-transformer": Entry(partial(own, Seq2Seq), words, token_loss),
    "densenet": picture_entry(torchvision_model, "densenet121", 32),
    "shufflenet": picture_entry(torchvision_model, "shufflenet_v2_x0_5", 32),
    "mnasnet": picture_entry(torchvision_model, "mnasnet0_5", 32),
    "regnet": picture_entry(torchvision_model, "regnet_y_400mf", 32),
    "googlenet": Entry(
        partial(torchvision_model, "googlenet", aux_logits=True, init_weights=False),
        partial(pixels, (64, 64)),
        auxiliary_loss,
    ),
    "deeplabv3": segmentation_entry("deeplabv3_mobilenet_v3_large", aux_loss=True),
    "lraspp": segmentation_entry("lraspp_mobilenet_v3_large"),
    "r3d": Entry(video_resnet, partial(pixels, (4, 16, 16)), logits_loss),
    "deit": named_entry("DeiTForImageClassification", intermediate_size=64, **VIT),
    "beit": named_entry(
        "BeitForImageClassification", intermediate_size=64, drop_path_rate=0.0, **VIT
    ),
    "dinov2": named_entry("Dinov2ForImageClassification", mlp_ratio=2, **VIT),
    "swin": named_entry("SwinForImageClassification", **SWIN),
    "swinv2": named_entry("Swinv2ForImageClassification", **SWIN),
}
