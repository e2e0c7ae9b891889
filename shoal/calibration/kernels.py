"""What one worker's device does alone: products, memory, launches, optimizer updates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROUND_S = 1e-3  # shorter than a time slice, so that most rounds are undisturbed
_FEWEST = 3


class Sample(NamedTuple):
    """Seconds of one call: the median over rounds and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, rounds_s: list[float]) -> Sample:
        low, median, high = statistics.quantiles(rounds_s, n=4, method="inclusive")
        return cls(median, low, high)


Synchronize = Callable[[], None]


def timed(call: Callable[[], Any], calls: int, after: Synchronize = lambda: None) -> float:
    """Seconds of one of so many calls."""
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    after()
    return (time.perf_counter() - start_s) / calls


def sample_rounds(
    call: Callable[[], Any], calls: int, rounds: int, before_round: Synchronize
) -> Sample:
    """So many rounds on every rank, where a call needs all ranks."""
    call()
    rounds_s = []
    for _ in range(max(_FEWEST, rounds)):
        before_round()
        rounds_s.append(timed(call, calls))
    return Sample.of(rounds_s)


ROWS = 1024
COLUMNS = 256
_HEADS, _POSITIONS, _HEAD_SIZE = 64, 64, 32


class NamedCase(NamedTuple):
    """A call, its names in forward and backward, and the amounts that a workload counts."""

    names: tuple[str, str]
    call: Callable[[], Tensor]
    inputs: list[Tensor]
    bytes: tuple[float, float]
    flops: tuple[float, float] = (0.0, 0.0)


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
    # causal attention in one kernel; operations are counted as half of all scores
    shape = (_HEADS // 4, 4, _POSITIONS, _HEAD_SIZE)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    size = 4.0 * q.numel()
    flops = 2.0 * _HEADS * _POSITIONS * _POSITIONS * _HEAD_SIZE
    attention = NamedCase(
        ("attention", "attention backward"),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [q, k, v],
        (4 * size, 8 * size),
        (flops, 2.5 * flops),
    )
    return [*cases, attention]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# rows, columns and inner size: as tokens x features x features, and the gradients of weights
SHAPES = (
    *((16, 16, 16), (64, 16, 64), (64, 64, 64), (256, 64, 64), (512, 96, 96), (256, 256, 256)),
    *((1024, 288, 96), (1024, 96, 384), (96, 384, 1024), (64, 1024, 1024), (512, 512, 512)),
    *((1024, 1024, 64), (64, 2048, 2048), (2048, 2048, 64), (1024, 1024, 1024)),
    (2048, 1024, 2048),
)
# of an accelerator
LARGE_SHAPES = ((4096, 4096, 1024), (4096, 4096, 4096), (8192, 8192, 4096), (8192, 8192, 8192))
# the largest one is more than the caches of a host hold
BYTES = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
LARGE_BYTES = (1 << 29,)
UPDATE_NUMEL = (1 << 10, 1 << 20)  # a small tensor shows the calls, a large one the bytes
_LAYERS = 20


class KernelBench:
    """Measures one device; all workers of a host do so at the same time."""

    def __init__(self, device: torch.device, synchronize: Synchronize):
        self.device = device
        self._synchronize = synchronize

    def products(self, dtype: str, seconds: float) -> list[dict[str, Any]]:
        shapes = SHAPES + (LARGE_SHAPES if self.device.type == "cuda" else ())
        found = []
        for m, n, k in shapes:
            for way, call in self._products(m, n, k, DTYPES[dtype]).items():
                with torch.no_grad():
                    took = self._sample(call, seconds / 3 / len(shapes))
                found.append({"way": way, "m": m, "n": n, "k": k, **took._asdict()})
        return found

    def _products(
        self, m: int, n: int, k: int, dtype: torch.dtype
    ) -> dict[str, Callable[[], Tensor]]:
        """As a linear layer has them: x W^T + b, the input's gradient g W, that of W g^T x."""
        left = torch.ones(m, k, dtype=dtype, device=self.device)
        right = torch.ones(k, n, dtype=dtype, device=self.device)
        weight = torch.ones(n, k, dtype=dtype, device=self.device)
        bias = torch.ones(n, dtype=dtype, device=self.device)
        gradient = torch.ones(k, m, dtype=dtype, device=self.device)
        return {
            "forward": partial(nn.functional.linear, left, weight, bias),
            "input": partial(torch.mm, left, right),
            "weight": partial(torch.mm, gradient.t(), right),
        }

    def named(self, seconds: float) -> list[dict[str, Any]]:
        """Kernels that take longer than their bytes say, forward and backward."""
        cases = named_cases(self.device)
        found = []
        for case in cases:
            out = case.call()
            backward = partial(_gradient, out, case.inputs, torch.ones_like(out))
            calls: dict[str, Callable[[], Any]] = {"forward": case.call, "backward": backward}
            times = {
                way: self._sample(call, seconds / 2 / len(cases))._asdict()
                for way, call in calls.items()
            }
            amounts = {"names": case.names, "bytes": case.bytes, "flops": case.flops}
            found.append({**amounts, **times})
        return found

    def memory(self, seconds: float) -> list[dict[str, Any]]:
        """Kernels that read one tensor and write another one, which exists already."""
        sizes = BYTES + (LARGE_BYTES if self.device.type == "cuda" else ())
        found = []
        for size in sizes:
            data = torch.ones(size // 4, device=self.device)
            call = partial(torch.neg, data, out=torch.empty_like(data))
            took = self._sample(call, seconds / len(sizes))
            found.append({"bytes": 2 * size, **took._asdict()})
        return found

    def launches(self, seconds: float) -> dict[str, Any]:
        """Seconds of one kernel of a model whose tensors are tiny, forward and backward."""
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(8, 8), nn.ReLU())]
        model = nn.Sequential(*layers).to(self.device)
        data = torch.ones(4, 8, device=self.device)
        forward = self._sample(lambda: model(data), seconds / 2)
        out = model(data)
        parameters = list(model.parameters())
        call = partial(_gradient, out, parameters, torch.ones_like(out))
        backward = self._sample(call, seconds / 2)
        kernels = 2 * _LAYERS  # a layer has a product and a relu, and in backward a product more
        return {
            "forward": Sample(*(value / kernels for value in forward))._asdict(),
            "backward": Sample(*(value / (1.5 * kernels) for value in backward))._asdict(),
        }

    def updates(self, seconds: float) -> list[dict[str, Any]]:
        """The update of one tensor by its size, as torch.optim does it on this device."""
        makers: dict[str, Callable[..., Any]] = {
            "adam": partial(torch.optim.AdamW, lr=1e-3),
            "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        }
        return [
            {"optimizer": name, "numel": numel, **self._update(make, numel, seconds / 4)._asdict()}
            for name, make in makers.items()
            for numel in UPDATE_NUMEL
        ]

    def _update(self, make: Callable[..., Any], numel: int, seconds: float) -> Sample:
        tensors = 8
        params = [torch.ones(numel, device=self.device) for _ in range(tensors)]
        for param in params:
            param.grad = torch.ones_like(param)
        took = self._sample(make(params).step, seconds)
        return Sample(*(value / tensors for value in took))

    def _sample(self, call: Callable[[], Any], seconds: float) -> Sample:
        """Rounds of equal numbers of calls, for about `seconds`; three rounds at least."""
        timed(call, 2, self._synchronize)  # to warm up
        calls = max(1, int(_ROUND_S / max(timed(call, 1, self._synchronize), 1e-9)))
        ends_s = time.perf_counter() + seconds
        rounds_s: list[float] = []
        while len(rounds_s) < _FEWEST or time.perf_counter() < ends_s:
            rounds_s.append(timed(call, calls, self._synchronize))
        return Sample.of(rounds_s)


def _gradient(out: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(out, inputs, gradient, retain_graph=True)
