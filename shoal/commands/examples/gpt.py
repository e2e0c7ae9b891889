"""Train a small GPT, character by character, on the source of the Python standard library.

    python -m shoal.commands.examples.gpt                        one worker, a minute or so
    shoal train -n 2 -s ddp gpt                         two workers
    shoal train --device cuda gpt --size large --precision bf16 --epochs 20

The text is that of the Python that runs this script: the same on every run, and on every
worker of one machine. Workers on several machines need the same version of Python.
"""

from __future__ import annotations

import math
import string
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.commands.examples.options import OptionParser, Options, batches, count, probability

NUM_CHARACTERS = 1_000_000
HELD_OUT = 0.05
ALPHABET = "\t\n" + string.printable[:95]  # the 95 printable characters of ASCII, space included
UNKNOWN = len(ALPHABET)
VOCABULARY = len(ALPHABET) + 1
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int  # tokens that the model sees at once
    lr: float


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=32, lr=6e-3),  # 0.1 million parameters
    "small": Size(layers=2, width=96, heads=4, context=64, lr=4e-3),  # 0.2
    "medium": Size(layers=8, width=512, heads=8, context=256, lr=1e-3),  # 25
    "large": Size(layers=18, width=768, heads=12, context=1024, lr=6e-4),  # 128, as GPT-2
}


def train(job: shoal.Job, options: Options | None = None) -> None:
    options = options or read_options()
    size = replace(SIZES[options.size], context=options.context)
    train_set, held_out = load_windows(size.context)
    num_steps = options.epochs * math.ceil(len(train_set) / options.batch_size)
    step = job.step(
        GPT(size, options.dropout),
        next_token_loss,
        optimizer=partial(adamw, lr=options.lr),
        lr=partial(warm_up_then_cosine, peak=options.lr, num_steps=num_steps),
        **options.of_step,
    )
    for batch in batches(job, train_set, options, "gpt"):
        job.log(loss=step(batch))
    results = test(job, held_out)
    job.print(f"held-out loss {results['loss']:.4f}, perplexity {results['perplexity']:.3f}")


def evaluate(job: shoal.Job, checkpoint: str, about: dict[str, Any]) -> dict[str, float]:
    """Test a checkpoint of this script."""
    options = about["options"]
    size = replace(SIZES[options["size"]], context=options["context"])
    job.step(GPT(size), next_token_loss, optimizer=partial(adamw, lr=options["lr"]))
    job.load(checkpoint)
    return test(job, load_windows(size.context)[1])


def test(job: shoal.Job, held_out: TensorDataset) -> dict[str, float]:
    results: dict[str, float] = job.evaluate(metrics, held_out, batch_size=16)
    return results | {"perplexity": math.exp(results["loss"])}


def metrics(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": next_token_loss(logits, targets)}


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens; windows are equally long, so it is the mean over windows too."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------ the model


class GPT(nn.Module):
    """(batch, time) tokens to (batch, time, vocabulary) logits of each next token."""

    def __init__(self, size: Size, dropout: float = 0.0):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, dropout) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False, device="meta")
        self.head.weight = self.tokens.weight
        self._initialize(size.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self, layers: int) -> None:
        """As GPT-2: what adds to the residual stream starts smaller the deeper the model."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * layers) if is_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class Attention(nn.Module):
    """Causal self-attention. Rows of `qkv` are ordered by head: some rows are some heads."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split_plan(self) -> dict[str, tuple[str, int]]:
        """For tp: some heads on each worker."""
        return {"qkv": ("column", 3 * self.head_width), "out": ("row", self.head_width)}

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind()  # each (batch, heads, time, head_width)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def split_plan(self) -> dict[str, tuple[str, int]]:
        return {"up": ("column", 1), "down": ("row", 1)}

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return projected


# ------------------------------------------------------------------------------ the update


def adamw(named: Iterable[tuple[str, nn.Parameter]], *, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, and none for vectors (biases and norms)."""
    pairs = list(named)
    matrices = [(name, p) for name, p in pairs if p.dim() >= 2]
    vectors = [(name, p) for name, p in pairs if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # a worker that holds a shard of the model may have no parameter of one kind
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))


def warm_up_then_cosine(step: int, *, peak: float, num_steps: int) -> float:
    """Rise to `peak` over the first 5% of the steps (100 at most), then fall to a tenth of it.

    `num_steps` is that of all epochs. `--steps` does not change it, so that a run that was stopped
    and resumed equals an uninterrupted one.
    """
    warm_up = max(1, min(100, num_steps // 20))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, num_steps - warm_up))
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


# ------------------------------------------------------------------------------ the data


@cache  # virtual workers share it
def load_windows(context: int) -> tuple[TensorDataset, TensorDataset]:
    """Windows to train on, and windows of the last 5% of the text to test on."""
    tokens = encode(library_text())
    num_train = len(tokens) - int(HELD_OUT * len(tokens))
    return windows(tokens[:num_train], context), windows(tokens[num_train:], context)


def library_text(num_characters: int = NUM_CHARACTERS) -> str:
    """The first characters of the public top-level modules of the library, in order of name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for file in sorted(folder.glob("[!_]*.py")):
        if len(text) >= num_characters:
            break
        text += file.read_text(encoding="utf-8", errors="replace")
    return text[:num_characters]


def encode(text: str) -> Tensor:
    codes = {character: code for code, character in enumerate(ALPHABET)}
    return torch.tensor([codes.get(character, UNKNOWN) for character in text])


def windows(tokens: Tensor, context: int) -> TensorDataset:
    """Pairs of `context` tokens and the same moved on by one, without overlap.

    tokens   a b c d e f g    context 3
    inputs   [a b c] [d e f]
    targets  [b c d] [e f g]
    """
    if len(tokens) <= context:
        raise shoal.BadInput(f"a context of {context} is too long for {len(tokens)} tokens")
    pieces = tokens.unfold(0, context + 1, context)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


# ------------------------------------------------------------------------------ the options


def read_options(argv: Sequence[str] | None = None) -> Options:
    about = "Train a small GPT on the source of the Python standard library."
    parser = OptionParser("gpt", about, epochs=1, batch_size=16, clip_norm=1.0)
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), default="small", help="how large a model (%(default)s)")
    add("--context", type=count, help="tokens in a window (by size)")
    add("--dropout", type=probability, default=0.0, help="share to drop (%(default)s)")
    given = parser.read(argv)
    size = SIZES[given.size]  # the size decides what was not given
    return given.but(context=given.context or size.context, lr=given.lr or size.lr)


if __name__ == "__main__":
    shoal.run(train)
