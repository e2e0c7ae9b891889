"""How long a kernel takes on a device: a roofline with measured efficiencies and launch cost.

    product:  max( flops / (peak * efficiency(flops)),  bytes / bandwidth )
    other:    bytes / (bandwidth * efficiency(bytes))

Kernels are launched one after the other by the host. Where a layer's kernels run faster than they
are launched, the launches are its time. A CPU computes what it launches, so there they add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster.hardware import Device
from shoal.plan.workload import Kernel


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


@dataclass(frozen=True)
class KernelModel:
    device: Device
    dtype: str

    def busy(self, kernel: Kernel) -> tuple[float, float]:
        """Seconds of one kernel on the device: (bound by compute, bound by memory)."""
        device = self.device
        share = device.memory_efficiency.at(max(1.0, kernel.bytes))
        memory_s = kernel.bytes / (device.memory_bytes_per_s * share)
        if not kernel.flops:
            return 0.0, memory_s
        one = kernel.flops
        rate = device.flops_of(self.dtype) * device.matmul_efficiency.at(one)
        compute_s = kernel.flops / rate
        return (compute_s, 0.0) if compute_s >= memory_s else (0.0, memory_s)

    def time(self, kernels: Iterable[Kernel], backward: bool = False) -> KernelTime:
        compute_s = 0.0
        memory_s = 0.0
        count = 0
        for kernel in kernels:
            computing, moving = self.busy(kernel)
            compute_s += computing
            memory_s += moving
            count += 1
        launches = count * self._launch_s(backward)
        if self.device.synchronous:
            return KernelTime(compute_s, memory_s, launches)
        return KernelTime(compute_s, memory_s, max(0.0, launches - compute_s - memory_s))

    def _launch_s(self, backward: bool) -> float:
        device = self.device
        if backward and device.backward_launch_s is not None:
            return device.backward_launch_s
        return device.launch_s
