"""What elastic runs train: a model with its data and options, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

SAMPLES = 96
BATCH = 24


@dataclass
class Recipe:
    """`averages`: with a moving average of the weights."""

    model: nn.Module
    loss: Callable[..., Tensor] | None
    data: Dataset[Any]
    options: dict[str, Any] = field(default_factory=dict)
    averages: bool = False
    batch_size: int = BATCH


class Tally(nn.Module):
    """A classifier that returns its loss, and counts how often each sample is trained.

    A row is 6 features, the class, and the sample as a one-hot vector. `CountingAdam` takes 1 from
    weight i of `counts` for each training of sample i.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Linear(32, 3))

    def forward(self, rows: Tensor) -> Tensor:
        features, targets, samples = rows[:, :6], rows[:, 6].long(), rows[:, 7:]
        loss: Tensor = F.cross_entropy(self.layers(features), targets)
        return loss + (samples @ self.counts).mean()


class CountingAdam(torch.optim.Adam):
    """Adam, but for the parameter that counts samples."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.shape == (SAMPLES,) and p.grad is not None:
                p -= BATCH * p.grad
                p.grad = None
        return super().step(closure)


def tally() -> Recipe:
    torch.manual_seed(0)
    features, targets = torch.randn(SAMPLES, 6), (torch.arange(SAMPLES) % 3).float()
    rows = torch.cat([features, targets[:, None], torch.eye(SAMPLES)], 1)
    options = {"optimizer": partial(CountingAdam, lr=0.01), "exact": True}
    return Recipe(Tally(), None, TensorDataset(rows), options)


class Counts(nn.Module):
    """With a learning rate of the batch size, each training of sample i takes 1 from weight i."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows @ self.counts).mean()


def counts() -> Recipe:
    """For strategies that average weights, whose bits depend on who was there."""
    options = {"optimizer": partial(torch.optim.SGD, lr=BATCH)}
    return Recipe(Counts(), None, TensorDataset(torch.eye(SAMPLES)), options)


def _all_options(**more: Any) -> dict[str, Any]:
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=200)
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "scheduler": schedule}
    return {**options, "exact": True, "clip_norm": 1.0, "precision": "bf16", **more}


def gpt2() -> Recipe:
    """With dropout, tied weights, bf16, a schedule of the learning rate and an average."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=51, n_positions=8, n_embd=12, n_layer=2, n_head=3)
    words = torch.randint(51, (SAMPLES, 9))

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"].flatten(0, 1).float(), targets.flatten())

    data = TensorDataset(words[:, :-1], words[:, 1:])
    return Recipe(transformers.GPT2LMHeadModel(config).train(), loss, data, _all_options(), True)


def bert() -> Recipe:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{"vocab_size": 51, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 26, "max_position_embeddings": 16, "num_labels": 3},
    )
    words, targets = torch.randint(51, (SAMPLES, 8)), torch.arange(SAMPLES) % 3

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"].float(), targets)

    model = transformers.BertForSequenceClassification(config).train()
    return Recipe(model, loss, TensorDataset(words, targets), _all_options(), True)


class Block(nn.Module):
    """Of a residual network."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet() -> Recipe:
    """With running statistics of BatchNorm, and dropout."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(8, 8, 1), Block(8, 16, 2), *head)
    data = TensorDataset(torch.randn(SAMPLES, 3, 10, 10), torch.arange(SAMPLES) % 3)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    return Recipe(model, F.cross_entropy, data, _all_options(optimizer=sgd), True)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tally": tally,
    "counts": counts,
    "gpt2": gpt2,
    "bert": bert,
    "resnet": resnet,
}
