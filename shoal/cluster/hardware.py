"""What a cluster is made of: devices that compute and links that carry bytes.

All quantities are in seconds, bytes and floating-point operations. `source` says where the numbers
of a block come from: "spec" (a datasheet), "assumed" (typical ones), "measured" or "fit".
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from shoal.errors import BadInput

UPDATE_KERNELS = {"adam": 8, "sgd": 3}  # that torch.optim runs for each tensor on a CPU


def _check_sizes(who: str, points: Sequence[tuple[float, float]]) -> None:
    sizes = [size for size, _ in points]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        raise BadInput(f"{who} points of increasing sizes above 0")


@dataclass(frozen=True)
class Curve:
    """A share between 0 and 1 by size, linear in the logarithm of the size, flat at both ends."""

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)  # (size, share), sorted by size

    def __post_init__(self) -> None:
        _check_sizes("a curve needs", self.points)

    @cached_property
    def _sizes(self) -> tuple[float, ...]:
        return tuple(size for size, _ in self.points)

    @cached_property
    def _lines(self) -> tuple[tuple[float, float], ...]:
        """(share at size 1, slope) of the line that ends at each point, and of what is behind."""
        lines = [(self.points[0][1], 0.0)]
        for (low, low_share), (high, high_share) in pairwise(self.points):
            slope = (high_share - low_share) / math.log(high / low)
            lines.append((low_share - slope * math.log(low), slope))
        return (*lines, (self.points[-1][1], 0.0))

    def at(self, size: float) -> float:
        start, slope = self._lines[bisect.bisect_right(self._sizes, size)]
        return start + slope * math.log(size) if slope else start


@dataclass(frozen=True)
class Device:
    """One GPU, or the cores that one worker computes on."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float] = field(hash=False)  # a second, by data type: fp32, bf16, …
    matmul_efficiency: Curve = Curve()  # share of the peak by operations of one matrix product
    memory_efficiency: Curve = Curve()  # share of the bandwidth by bytes of one kernel
    launch_s: float = 0.0  # the least time of one kernel
    # a blocking send between stages: the host waits for the device, a CPU worker is woken up
    wait_s: float = 0.0
    meet_s: float = 0.0  # CPU workers that computed meet in a call: more than its own time
    call_s: float = 0.0  # of a collective on GPUs, beside its messages
    step_s: float = 0.0  # once a step: data, bookkeeping, the optimizer's host time
    microbatch_s: float = 0.0  # host time of a micro-batch in each chunk: data, loss, schedule
    served_step_s: float = 0.0  # more than that where a server of the host holds the weights
    request_s: float = 0.0  # of such a server's time, for one push and pull without bytes
    # bytes a second of an asynchronous push and pull, with an update as SGD with momentum makes it
    served_bytes_per_s: float | None = None  # None: from passes over memory
    served_efficiency: Curve = Curve()  # share of it by bytes of a push
    # of the time of communication beside kernels, what they take longer: it needs units and memory
    overlap_cost: float = 0.0
    backward_launch_s: float | None = None  # the same through autograd; None: as `launch_s`
    synchronous: bool = False  # launches add to kernels, as on a CPU: nothing runs ahead
    update_bytes_per_s: float | None = None  # of the optimizer; None: as other kernels
    momentum_bytes_per_s: float | None = None  # the same with one state or none, as SGD has
    update_launch_s: float = 0.0  # one of the kernels that update a tensor, on a CPU
    # products of backward, whose operands lie the other way round; None: as in forward
    backward_matmul_efficiency: Curve | None = None
    # products of PyTorch by rows, columns and inner size: share of the peak; none: by operations
    products: tuple[tuple[float, float, float, float], ...] = ()
    # causal attention by kernel: size of a head, sequence, share of the peak forward and backward
    attention: Mapping[str, tuple[tuple[float, float, float, float], ...]] = field(
        default_factory=dict, hash=False
    )
    # the host's seconds for a kernel by what runs ("eager", "eager backward"); else `launch_s`
    launches_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    gap_s: float = 0.0  # from the end of a kernel to the next one
    fused_update_bytes_per_s: float | None = None  # of an optimizer of one kernel
    watts: float | None = None  # the limit of its power in all figures
    power_limit_watts: float | None = None  # that of its runs; None: the same
    # how much longer kernels of a name take than their bytes or operations say: gelu, softmax, …
    kernel_factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    threads: int | None = None  # cores that it computes on, where it is a CPU
    # measured seconds over those from the figures above, where a model was profiled; no file has it
    forward_pace: float = 1.0
    backward_pace: float = 1.0
    update_pace: float = 1.0
    source: str = "spec"
    assumed: tuple[str, ...] = ()  # keys whose figures are typical ones, whatever `source` says
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def factor_of(self, name: str) -> float:
        """The factor of a kernel, by the last words of its name."""
        words = name.split()
        for start in range(max(0, len(words) - _MOST_WORDS), len(words)):
            factor = self.kernel_factors.get(" ".join(words[start:]))
            if factor is not None:
                return factor
        return 1.0

    @property
    def _power_share(self) -> float:
        """Of the clock, with less power: half of the power leaves three quarters of it."""
        if self.watts is None or self.power_limit_watts is None:
            return 1.0
        return min(1.0, math.pow(self.power_limit_watts / self.watts, _CLOCK_BY_POWER))

    def product_share(self, m: float, n: float, k: float) -> float:
        """Share of the peak, between the nearest products that were measured.

        Sizes that are no multiples of 8 take other kernels: they are a kind of their own.
        """
        sizes = _sizes_of_product(m, n, k)
        points = [(*_sizes_of_product(*one[:3]), one[3]) for one in self.products]
        known = [one for one in points if _alignment(one) == _alignment(sizes)]
        return _between(known or points, sizes)

    def attention_share(
        self, kernel: str, head: float, sequence: float, backward: bool
    ) -> float | None:
        points = [(h, s, shares[backward]) for h, s, *shares in self.attention.get(kernel, ())]
        return _between(points, (head, sequence)) if points else None

    def pass_s(self, num_bytes: float) -> float:
        """Reading or writing so many bytes."""
        share = self.memory_efficiency.at(max(1.0, num_bytes))
        return num_bytes / (self.memory_bytes_per_s * share)

    def flops_of(self, dtype: str) -> float:
        """The peak rate of a data type; the nearest wider one where it has none of its own."""
        for name in (dtype, *_WIDER.get(dtype, ())):
            if name in self.peak_flops:
                return self.peak_flops[name] * self._power_share
        known = ", ".join(self.peak_flops)
        raise BadInput(f"device {self.name} has no peak rate for {dtype}; it has {known}")


_MOST_WORDS = 3
_CLOCK_BY_POWER = 0.4
_ALIGNED = 8
_NEAREST = 4
_NEAR = 0.01  # of the squared logarithm of a size: closer than this is the same


def _sizes_of_product(m: float, n: float, k: float) -> tuple[float, float, float]:
    return min(m, n), max(m, n), k


def _alignment(sizes: Sequence[float]) -> tuple[bool, bool]:
    """Whether rows or columns, and the inner size, are no multiples of 8."""
    return any(size % _ALIGNED for size in sizes[:2]), sizes[2] % _ALIGNED > 0


def _between(points: Sequence[tuple[float, ...]], sizes: tuple[float, ...]) -> float:
    """The mean of the nearest points by the logarithms of their sizes; the last number is meant."""

    def distance(point: tuple[float, ...]) -> float:
        pairs = zip(point, sizes, strict=False)
        return sum(math.log(one / other) ** 2 for one, other in pairs)

    near = sorted((distance(point), point[-1]) for point in points)[:_NEAREST]
    weights = [1 / (_NEAR + away) for away, _ in near]
    total = sum(weight * share for weight, (_, share) in zip(weights, near, strict=True))
    return total / sum(weights)


_WIDER = {
    "fp8": ("fp16", "bf16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "tf32": ("fp32",),
}


AT_PORT_S = 1e-4  # the most of an alpha that is work of the ends; the rest is distance


def alphas_at_once(alpha_s: float, messages: float) -> float:
    """Of so many messages that a port sends together."""
    at_port_s = min(alpha_s, AT_PORT_S)
    return at_port_s * messages + alpha_s - at_port_s if messages else 0.0


@dataclass(frozen=True)
class LinkSpec:
    """A kind of link, in one direction; both directions work at the same time."""

    name: str
    bytes_per_s: float
    alpha_s: float  # of one message, end to end
    efficiency: float = 1.0  # share of `bytes_per_s` that large messages reach
    shared: bool = False  # one for all devices behind it, as PCIe; else one for each
    transport: str = "rdma"  # of a NIC: rdma; tcp and ipoib go through the host
    source: str = "spec"
    assumed: tuple[str, ...] = ()  # keys whose figures are typical ones, whatever `source` says
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    @property
    def rate(self) -> float:
        """Bytes a second that large messages reach."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class MeasuredCalls:
    """Seconds of one call by bytes, with so many ranks: of one node, or one of each node."""

    executor: str  # shm, nccl
    kind: str  # all_reduce, …, send, or server (a push and a pull of all bytes)
    algorithm: str
    ranks: int
    points: tuple[tuple[float, float], ...]  # (bytes, seconds), sorted by bytes
    spread: tuple[tuple[float, float], ...] = ()  # quartiles of the seconds of each point

    def __post_init__(self) -> None:
        _check_sizes(f"the calls of {self.kind} need", self.points)
        if not all(seconds > 0 for _, seconds in self.points):
            raise BadInput(f"the seconds of the calls of {self.kind} must be above 0")

    def seconds(self, num_bytes: float) -> float:
        """Linear between points; below them as the smallest, beyond them at the last rate."""
        points = self.points
        if num_bytes <= points[0][0] or len(points) == 1:
            return points[0][1] * max(1.0, num_bytes / points[0][0])
        after = min(bisect.bisect_left(points, (num_bytes, 0.0)), len(points) - 1)
        (low, low_s), (high, high_s) = points[after - 1 : after + 1]
        if num_bytes > high:
            return high_s + max(0.0, high_s - low_s) / (high - low) * (num_bytes - high)
        return low_s + (num_bytes - low) / (high - low) * (high_s - low_s)
