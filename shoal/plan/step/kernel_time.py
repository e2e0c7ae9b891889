"""How long a kernel takes on a device: a roofline with measured efficiencies and launch cost.

    product:  max( flops / (peak * efficiency(flops)),  bytes / bandwidth )
    other:    bytes / (bandwidth * efficiency(bytes))

Kernels are launched one after the other by the host. Where a layer's kernels run faster than they
are launched, the launches are its time. A CPU computes what it launches, so there they add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shoal.cluster.hardware import Device
from shoal.plan.workloads.workload import Kernel


class KernelTime(NamedTuple):
    """Seconds by what bounds them."""

    compute_s: float
    memory_s: float
    launch_s: float  # beyond what the device needs

    @property
    def seconds(self) -> float:
        return self.compute_s + self.memory_s + self.launch_s

    @property
    def bound(self) -> str:
        largest = max(self)
        return ("compute", "memory", "launch")[self.index(largest)]


class KernelModel:
    """Times kernels of one data type on one device; remembers those it has timed."""

    def __init__(self, device: Device, dtype: str):
        self.device = device
        self.dtype = dtype
        self._peak = device.flops_of(dtype)
        self._known: dict[tuple[float, float, float, bool], tuple[float, float]] = {}
        self._factors: dict[str, float] = {}

    def busy(self, kernel: Kernel, backward: bool = False) -> tuple[float, float]:
        """Seconds of one kernel on the device: (bound by compute, bound by memory)."""
        factor = self._factors.get(kernel.name)
        if factor is None:
            factor = self.device.factor_of(kernel.name)
            self._factors[kernel.name] = factor
        key = (kernel.flops, kernel.bytes, factor, backward)
        found = self._known.get(key)
        if found is None:
            found = self._busy(*key)
            self._known[key] = found
        return found

    def _busy(
        self, flops: float, num_bytes: float, factor: float, backward: bool
    ) -> tuple[float, float]:
        device = self.device
        curve = device.matmul_efficiency
        if backward and device.backward_matmul_efficiency is not None:
            curve = device.backward_matmul_efficiency
        share = device.memory_efficiency.at(max(1.0, num_bytes))
        memory_s = factor * num_bytes / (device.memory_bytes_per_s * share)
        if not flops:
            return 0.0, memory_s
        compute_s = factor * flops / (self._peak * curve.at(flops))
        return (compute_s, 0.0) if compute_s >= memory_s else (0.0, memory_s)

    def time(
        self,
        kernels: Iterable[Kernel],
        backward: bool = False,
        sending_s: float = 0.0,
        messages: int = 0,
    ) -> KernelTime:
        """Kernels, beside messages that the host launches, too, and the device waits for."""
        compute_s = 0.0
        memory_s = 0.0
        count = messages
        for kernel, number in Counter(kernels).items():  # rounds of a ring repeat theirs
            computing, moving = self.busy(kernel, backward)
            compute_s += number * computing
            memory_s += number * moving
            count += number
        launches_s = count * self._launch_s(backward)
        pace = self.device.backward_pace if backward else self.device.forward_pace
        if self.device.synchronous:
            return KernelTime(pace * compute_s, pace * memory_s, pace * launches_s)
        busy_s = compute_s + memory_s + sending_s
        exposed_s = max(0.0, launches_s - busy_s)
        return KernelTime(pace * compute_s, pace * memory_s, pace * exposed_s)

    def busy_s(self, kernels: Iterable[Kernel], backward: bool = False) -> float:
        """Seconds of kernels on the device, without launches."""
        counted = Counter(kernels).items()
        return sum(number * sum(self.busy(kernel, backward)) for kernel, number in counted)

    def _launch_s(self, backward: bool) -> float:
        device = self.device
        if backward and device.backward_launch_s is not None:
            return device.backward_launch_s
        return device.launch_s
