"""What is measured on a GPU: the calls of training, at its sizes.

Bytes are those that a workload counts: what a call reads and writes, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.observe.calibration.device import BLOCK_HEADS, BLOCK_WIDTH

_WIDTHS = (768, 1024, 1280, 1600, 2048, 4096, 8192)
_TOKENS = (2048, 8192, 32768)
_OF_A_BLOCK = ((3, 1), (1, 1), (4, 1), (1, 4))  # outputs and inputs of its layers, in widths
_CLASSES = (50257, 50304)  # the first of them is not a multiple of 8, which takes other kernels
# rows, columns and inner size
PRODUCTS = (
    *((16, 1024, 1024), (128, 1024, 1024), (512, 512, 512), (512, 2048, 2048)),
    *(
        (tokens, outputs * width, inputs * width)
        for width in _WIDTHS
        for outputs, inputs in _OF_A_BLOCK
        for tokens in _TOKENS
    ),
    *(
        (tokens, classes, width)
        for classes in _CLASSES
        for width in (768, 1600, 4096)
        for tokens in _TOKENS
    ),
)
ROWS = 131072  # for kernels that are longer than the host needs to launch them
COLUMNS = 1024
_HIDDEN = 1024
_TOKENS_OF_ATTENTION = 32768
_LOGITS = 16384
BF16 = torch.bfloat16


class NamedCase(NamedTuple):
    """A call, its names in forward and backward ("" where there is none), and what it moves."""

    names: tuple[str, str]
    call: Callable[[], Any]
    inputs: list[Tensor]
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)


def _normalized(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (COLUMNS,), scale, scale)


def _added(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _normalized(total, y, scale).to(BF16)


# names, a function of wide and narrow numbers and a scale, and the bytes of an element; what is
# called fused is compiled
_POINTWISE: tuple[tuple[str, str, Callable[..., Any], int, int], ...] = (
    ("to_copy", "to_copy mixed", lambda x, y, s: x.to(BF16), 6, 6),
    ("gelu", "gelu_backward", lambda x, y, s: F.gelu(y), 4, 6),
    ("silu", "silu_backward", lambda x, y, s: F.silu(y), 4, 6),
    ("native_dropout", "native_dropout_backward", lambda x, y, s: F.dropout(y), 5, 5),
    ("mul", "", lambda x, y, s: y * y, 6, 0),
    ("add mixed", "", lambda x, y, s: x + y, 10, 0),
    ("sum", "", lambda x, y, s: y.sum(0), 2, 0),
    ("cat", "", lambda x, y, s: torch.cat([y, y], 1), 8, 0),
    ("native_layer_norm", "native_layer_norm_backward", _normalized, 8, 12),
    ("softmax", "softmax_backward_data", lambda x, y, s: x.softmax(-1), 8, 12),
    ("fused norm", "fused norm backward", _added, 12, 16),
    ("fused gelu", "fused gelu backward", lambda x, y, s: F.gelu(y), 4, 6),
)
# the same of logits and targets
_LOSSES: tuple[tuple[str, str, Callable[..., Any], int, int], ...] = (
    ("log_softmax", "log_softmax_backward_data", lambda x, y, t: y.log_softmax(-1), 4, 6),
    ("nll_loss_forward", "nll_loss_backward", lambda x, y, t: F.nll_loss(x, t), 4, 8),
    ("fused loss", "fused loss backward", lambda x, y, t: F.cross_entropy(y.float(), t), 2, 4),
)


def gpu_cases(are_compiled: bool) -> Iterator[NamedCase]:
    """One after the other, so that the memory of one is free for the next."""
    targets = torch.randint(_CLASSES[0], (ROWS,), device="cuda")
    for sizes, more, cases in (
        ((ROWS, COLUMNS), _numbers(COLUMNS), _POINTWISE),
        ((_LOGITS, _CLASSES[0]), targets[:_LOGITS], _LOSSES),
    ):
        wide = _numbers(*sizes)
        narrow = wide.detach().to(BF16).requires_grad_()
        inputs = [wide, narrow, *((more,) if more.requires_grad else ())]
        for there, back, function, moved, moved_back in cases:
            if there.startswith("fused") != are_compiled:
                continue
            size = float(wide.numel())
            run = torch.compile(function) if are_compiled else function
            call = partial(run, wide, narrow, more)
            yield NamedCase((there, back), call, inputs, (moved * size, moved_back * size))
    if are_compiled:
        return
    table = _numbers(_CLASSES[0], _HIDDEN)
    size = 4.0 * ROWS * _HIDDEN
    amounts = (2 * size, size + 4.0 * table.numel())
    call = partial(F.embedding, targets, table)
    yield NamedCase(("embedding", "embedding_dense_backward"), call, [table], amounts)


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").requires_grad_()


KERNELS = {
    "sdpa": None,  # as PyTorch chooses
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEAD_SIZES = (64, 128)
SEQUENCES = (512, 1024, 2048, 4096, 8192)
_MOST_SCORES = 2048  # positions of those that keep all scores


def attention_cases(kernel: str) -> Iterator[tuple[int, int, NamedCase]]:
    """Head size, sequence, and causal attention of so many tokens in bf16."""
    for head in HEAD_SIZES:
        for sequence in SEQUENCES:
            if kernel == "math" and sequence > _MOST_SCORES:
                continue
            batch = _TOKENS_OF_ATTENTION // sequence
            heads = _HIDDEN // head
            packed = torch.randn(batch, sequence, 3, heads, head, device="cuda", dtype=BF16)
            inputs = [one.transpose(1, 2).detach().requires_grad_() for one in packed.unbind(2)]
            flops = 2.0 * batch * heads * sequence * sequence * head  # of half of all scores
            names = (kernel, f"{kernel} backward")
            call = partial(_attend, KERNELS[kernel], *inputs)
            case = NamedCase(names, call, inputs, (0.0, 0.0), (flops, 2.5 * flops))
            yield head, sequence, case


def _attend(kernel: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel) if kernel is not None else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TinyBlock(nn.Module):
    """A block of a transformer: tiny, it shows what the host needs to launch it."""

    def __init__(self) -> None:
        super().__init__()
        width = BLOCK_WIDTH
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, BLOCK_HEADS, -1))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        x = x + self.down(self.activation(self.up(self.norm_2(x))))
        return x
