"""What one worker's device does alone: products, memory, launches, optimizer updates."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.observe.calibration import gpu_cases
from shoal.observe.calibration.device import BLOCK_TOKENS, BLOCK_WIDTH, BLOCKS
from shoal.observe.calibration.gpu_cases import NamedCase

_ROUND_S = 1e-3  # shorter than a time slice, so that most rounds are undisturbed
_GPU_ROUND_S = 1e-2  # longer than the wait at its end
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
_HEADS = 64
_POSITIONS = 64
_HEAD_SIZE = 32


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
# the largest one is more than the caches of a host hold
BYTES = (1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
LARGE_BYTES = (1 << 29,)
UPDATE_NUMEL = (1 << 10, 1 << 20)  # a small tensor shows the calls, a large one the bytes
GPU_UPDATE_NUMEL = (1 << 10, 1 << 25)
_COPIED_BYTES = 1 << 28
_CASES = 16  # about as many as there are
_ATTENTION_CASES = 46
_LAYERS = 20
_COMPILE_S = 4.0  # of a call, before the first one
_COMPILE_BLOCKS_S = 20.0


class KernelBench:
    """Measures one device; all workers of a host do so at the same time."""

    def __init__(self, device: torch.device, synchronize: Synchronize):
        self.device = device
        self.ends_s = math.inf  # on the clock of time.perf_counter; each section has its own
        self.left_out: Counter[str] = Counter()  # how many there was no time for, by section
        self._synchronize = synchronize

    def has_time(self, section: str, least_s: float = 0.0) -> bool:
        """Whether one more may be measured; if not, it is counted."""
        if time.perf_counter() + least_s < self.ends_s:
            return True
        self.left_out[section] += 1
        return False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def products(self, seconds: float) -> dict[str, list[dict[str, Any]]]:
        """By type; the smallest come first."""
        shapes: dict[str, Sequence[tuple[int, int, int]]] = {"fp32": SHAPES}
        if self.on_gpu:
            few = gpu_cases.PRODUCTS[52:64]
            shapes = {"fp32": few, "fp16": few, "bf16": gpu_cases.PRODUCTS}
        each_s = seconds / 3 / sum(map(len, shapes.values()))
        found: dict[str, list[dict[str, Any]]] = {}
        for dtype, sizes in shapes.items():
            rows = found[dtype] = []
            for size in sorted(sizes, key=math.prod):
                if not rows or self.has_time(f"products in {dtype}"):
                    rows.extend(self._product(size, dtype, each_s))
        return found

    def _product(
        self, size: tuple[int, int, int], dtype: str, seconds: float
    ) -> Iterator[dict[str, Any]]:
        rows, outputs, inputs = size
        for way, sizes, call in self._products(rows, outputs, inputs, DTYPES[dtype]):
            with torch.no_grad():
                took = self._sample(call, seconds)
            yield {"way": way, **sizes, **took._asdict()}

    def _products(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype
    ) -> Iterator[tuple[str, dict[str, int], Callable[[], Tensor]]]:
        """Those of a linear layer: x W^T + b, the input's gradient g W, that of W g^T x."""
        # a GPU takes less power, and is faster, where all numbers are equal
        filled = partial(
            torch.randn if self.on_gpu else torch.ones, dtype=dtype, device=self.device
        )
        weight = filled(outputs, inputs)
        bias = filled(outputs)
        data = filled(rows, inputs)
        gradient = filled(rows, outputs)
        forward = partial(nn.functional.linear, data, weight, bias)
        yield "forward", {"m": rows, "n": outputs, "k": inputs}, forward
        yield "input", {"m": rows, "n": inputs, "k": outputs}, partial(torch.mm, gradient, weight)
        of_weight = partial(torch.mm, gradient.t(), data)
        yield "weight", {"m": outputs, "n": inputs, "k": rows}, of_weight

    def named(self, seconds: float) -> list[dict[str, Any]]:
        """Kernels that take longer than their bytes say, forward and backward."""
        cases = gpu_cases.gpu_cases(are_compiled=False)
        return self._all_named(cases if self.on_gpu else iter(named_cases(self.device)), seconds)

    def compiled(self, seconds: float) -> list[dict[str, Any]]:
        """The same of kernels that torch.compile makes."""
        return self._all_named(gpu_cases.gpu_cases(are_compiled=True), seconds, _COMPILE_S)

    def _all_named(
        self, cases: Iterator[NamedCase], seconds: float, least_s: float = 0.0
    ) -> list[dict[str, Any]]:
        return [
            self._named(case, seconds / 2 / _CASES)
            for case in cases
            if self.has_time("compiled kernels" if least_s else "kernels by name", least_s)
        ]

    def _named(self, case: NamedCase, seconds: float) -> dict[str, Any]:
        out = case.call()
        kept = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
        backward = partial(_gradient, kept, case.inputs, [torch.ones_like(one) for one in kept])
        amounts = {"names": case.names, "bytes": case.bytes, "flops": case.flops}
        calls: dict[str, Callable[[], Any]] = {"forward": case.call, "backward": backward}
        times = {
            way: self._sample(call, seconds)._asdict()
            for name, (way, call) in zip(case.names, calls.items(), strict=True)
            if name
        }
        return {**amounts, **times}

    def attention(self, seconds: float) -> list[dict[str, Any]]:
        """Each kernel that torch has on a GPU, by the size of a head and the sequence."""
        found: list[dict[str, Any]] = []
        for kernel in gpu_cases.KERNELS if self.on_gpu else ():
            with suppress(RuntimeError):  # one that this GPU does not have
                for head, sequence, case in gpu_cases.attention_cases(kernel):
                    if not self.has_time(f"attention by {kernel}"):
                        continue
                    row = self._named(case, seconds / 2 / _ATTENTION_CASES)
                    found.append({"kernel": kernel, "head": head, "sequence": sequence, **row})
        return found

    def hosts(self, seconds: float) -> dict[str, Any]:
        """Seconds of the host to launch one block, eager and compiled."""
        blocks = nn.Sequential(*(gpu_cases.TinyBlock() for _ in range(BLOCKS)))
        shape = (1, BLOCK_TOKENS, BLOCK_WIDTH)
        data = torch.randn(shape, device=self.device, requires_grad=True)
        found = {}
        for kernels, least_s in (("eager", 0.0), ("compiled", _COMPILE_BLOCKS_S)):
            if not self.has_time(f"launches of {kernels} blocks", least_s):
                continue
            model = blocks.to(self.device)
            run = torch.compile(model) if kernels == "compiled" else model
            parameters = list(model.parameters())

            def forward(run: Callable[[Tensor], Tensor] = run) -> Tensor:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return run(data)

            out = forward()
            back = partial(_gradient, [out], parameters, [torch.ones_like(out)])
            samples: dict[str, Callable[[], Any]] = {"forward": forward, "backward": back}
            found[kernels] = {
                way: Sample(*(one / BLOCKS for one in self._sample(call, seconds / 40)))._asdict()
                for way, call in samples.items()
            }
        return found

    def copies(self, seconds: float) -> dict[str, Any]:
        """Bytes a second between pinned memory of the host and the GPU."""
        host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=self.device)
        ways = {"to device": partial(there.copy_, host), "to host": partial(host.copy_, there)}
        return {
            way: {"bytes": _COPIED_BYTES, **self._sample(call, seconds / 2)._asdict()}
            for way, call in ways.items()
        }

    def memory(self, seconds: float) -> list[dict[str, Any]]:
        """Kernels that read one tensor and write another one, which exists already."""
        sizes = BYTES + (LARGE_BYTES if self.device.type == "cuda" else ())
        found: list[dict[str, Any]] = []
        for size in sizes:
            if found and not self.has_time("memory"):
                continue
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
        call = partial(_gradient, [out], parameters, [torch.ones_like(out)])
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
        if self.on_gpu:
            makers["fused adam"] = partial(torch.optim.AdamW, lr=1e-3, fused=True)
        return [
            {"optimizer": name, "numel": numel, **self._update(make, numel, seconds / 6)._asdict()}
            for name, make in makers.items()
            for numel in (GPU_UPDATE_NUMEL if self.on_gpu else UPDATE_NUMEL)
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
        round_s = _GPU_ROUND_S if self.on_gpu else _ROUND_S
        calls = max(1, int(round_s / max(timed(call, 1, self._synchronize), 1e-9)))
        ends_s = time.perf_counter() + seconds
        rounds_s: list[float] = []
        while len(rounds_s) < _FEWEST or time.perf_counter() < ends_s:
            rounds_s.append(timed(call, calls, self._synchronize))
            if self.on_gpu:  # products alone, without a rest, would lower its clock
                time.sleep(rounds_s[-1] * calls)
        return Sample.of(rounds_s)


def _gradient(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
