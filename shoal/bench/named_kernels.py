"""Kernels that are slower than their bytes say: exponentials, reductions, attention.

The names are those of traced workloads, so that a prediction finds the factor of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.bench.sampling import Sample

ROWS = 1024
COLUMNS = 256
_HEADS, _POSITIONS, _HEAD_SIZE = 64, 64, 32


@dataclass(frozen=True)
class NamedCase:
    """A call, its names in forward and backward, and the amounts that a workload counts."""

    names: tuple[str, str]
    call: Callable[[], Tensor]
    inputs: list[Tensor]
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)

    def document(self, forward: Sample, backward: Sample) -> dict[str, Any]:
        return {
            "names": self.names,
            "bytes": self.bytes,
            "flops": self.flops,
            "forward": forward._asdict(),
            "backward": backward._asdict(),
        }


def named_cases(device: torch.device) -> list[NamedCase]:
    data = torch.randn(ROWS, COLUMNS, device=device, requires_grad=True)
    size = 4.0 * data.numel()
    pointwise: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("gelu", "gelu_backward"): lambda: F.gelu(data, approximate="tanh"),
        ("silu", "silu_backward"): lambda: F.silu(data),
        ("tanh", "tanh_backward"): lambda: data.tanh(),
        ("native_layer_norm", "native_layer_norm_backward"): lambda: F.layer_norm(data, (COLUMNS,)),
        ("log_softmax", "log_softmax_backward_data"): lambda: data.log_softmax(-1),
        ("softmax", "softmax_backward_data"): lambda: data.softmax(-1),
    }
    cases = [
        NamedCase(names, call, [data], (2 * size, 3 * size)) for names, call in pointwise.items()
    ]
    return [*cases, _attention(device)]


def _attention(device: torch.device) -> NamedCase:
    """Causal attention in one kernel; operations are counted as half of all scores."""
    shape = (_HEADS // 4, 4, _POSITIONS, _HEAD_SIZE)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    size = 4.0 * q.numel()
    flops = 2.0 * _HEADS * _POSITIONS * _POSITIONS * _HEAD_SIZE
    return NamedCase(
        ("attention", "attention backward"),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [q, k, v],
        (4 * size, 8 * size),
        (flops, 2.5 * flops),
    )
