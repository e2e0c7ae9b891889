"""How long the layers of a workload take on a cluster: kernels, launches and messages.

The host launches kernels and collectives one after the other; where they run faster than they are
launched, launching them is the layer's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster.hardware import Device
from shoal.plan.step.collective_time import CollectiveTime, Network, RankGroup
from shoal.plan.workloads import GROUPED, Kernel, LayerCost, LayerMessage, Split, Workload


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


_GROUP_SHARE = 0.65  # of a single product's rate: fitted to GPT-OSS, Qwen3 and DeepSeek-V3
_NOT_FP8 = ("attention", "scores", "values", "logits")  # products that stay bf16 beside it


class KernelModel:
    """Times kernels of one data type on one device; remembers those it has timed."""

    def __init__(self, device: Device, dtype: str):
        self.device = device
        self.dtype = dtype
        self._peak = device.flops_of(dtype)
        self._known: dict[tuple[float, ...], tuple[float, float]] = {}
        self._named: dict[str, tuple[float, float]] = {}  # factor and peak of a kernel
        self._timed: dict[tuple[object, ...], KernelTime] = {}

    def busy(self, kernel: Kernel, backward: bool = False) -> tuple[float, float]:
        """Seconds of one kernel on the device: (bound by compute, bound by memory)."""
        device, name = self.device, kernel.name
        if name not in self._named:
            is_wide = self.dtype == "fp8" and name.partition(" ")[0] in _NOT_FP8
            peak = device.flops_of("bf16") if is_wide else self._peak
            self._named[name] = device.factor_of(name), peak
        factor, peak = self._named[name]
        key = (kernel.flops, kernel.bytes, kernel.k, factor, peak, backward)
        if key not in self._known:
            curve = device.matmul_efficiency
            if backward and device.backward_matmul_efficiency is not None:
                curve = device.backward_matmul_efficiency
            compute_s, memory_s = 0.0, factor * device.pass_s(kernel.bytes)
            if kernel.flops:
                share = curve.at(kernel.flops)
                if name.startswith(GROUPED):
                    share = _GROUP_SHARE * curve.at(kernel.flops / kernel.batch)
                compute_s = factor * kernel.flops / (peak * share)
            is_longer = compute_s >= memory_s and kernel.flops > 0
            compute_s, memory_s = (compute_s, 0.0) if is_longer else (0.0, memory_s)
            if self.dtype == "fp8" and peak > device.flops_of("bf16") and kernel.flops:
                # both operands are read in bf16, scaled and written
                operands = kernel.batch * kernel.k * (kernel.m + kernel.n)
                memory_s += device.pass_s(3 * operands)
            self._known[key] = compute_s, memory_s
        return self._known[key]

    def time(
        self,
        kernels: tuple[Kernel, ...],
        backward: bool = False,
        sending_s: float = 0.0,
        messages: int = 0,
    ) -> KernelTime:
        """Kernels, beside messages that the host launches, too, and the device waits for."""
        key = (kernels, backward, sending_s, messages)
        if key in self._timed:
            return self._timed[key]
        compute_s = memory_s = 0.0
        count = messages
        for kernel, number in Counter(kernels).items():  # rounds of a ring repeat theirs
            computing, moving = self.busy(kernel, backward)
            compute_s += number * computing
            memory_s += number * moving
            count += number
        device = self.device
        pace, launch_s = device.forward_pace, device.launch_s
        if backward:
            pace = device.backward_pace
            launch_s = launch_s if device.backward_launch_s is None else device.backward_launch_s
        launches_s = count * launch_s
        if not device.synchronous:
            launches_s = max(0.0, launches_s - (compute_s + memory_s + sending_s))
        took = self._timed[key] = KernelTime(pace * compute_s, pace * memory_s, pace * launches_s)
        return took

    def busy_s(self, kernels: Iterable[Kernel], backward: bool = False) -> float:
        """Seconds of kernels on the device, without launches."""
        counted = Counter(kernels).items()
        return sum(number * sum(self.busy(kernel, backward)) for kernel, number in counted)


MESSAGE_AXES = ("tp", "cp", "ep")
AxisGroups = tuple[RankGroup, RankGroup, RankGroup]  # of MESSAGE_AXES


class LayerTime(NamedTuple):
    """One layer, one micro-batch: seconds by activity, and what bounds them."""

    seconds: float  # all of it
    forward: KernelTime
    backward: KernelTime  # of inputs and weights
    weight_s: float  # the part of backward that makes weight gradients
    recompute: KernelTime
    messages: tuple[CollectiveTime, ...]  # by MESSAGE_AXES
    hiding_s: float = 0.0  # of backward, during which blocks of a ring are on their way
    meetings: int = 0  # calls for which the workers of a replica wait for each other
    lone_s: float = 0.0  # of messages, what computing of another micro-batch hides


@dataclass(frozen=True)
class LayerTable:
    """One layer of every run under one split: lists by run."""

    times: tuple[LayerTime, ...]
    seconds: tuple[float, ...]
    parameters: tuple[float, ...]
    shared_parameters: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    expert_parameters: tuple[float, ...]
    largest_tensor: float  # numbers
    recompute_bytes: float  # of the layer that is computed again, while it is


_COLUMNS = (
    *("parameters", "shared_parameters", "expert_parameters"),
    *("activation_bytes", "output_bytes"),
)


class LayerClock:
    """Times layers; what a split and its groups gave before is remembered."""

    def __init__(self, workload: Workload, network: Network):
        self.workload = workload
        self.network = network
        device = network.cluster.device
        self._kernels = KernelModel(device, workload.precision.compute)
        # of a message, what kernels beside it get done; a CPU computes or sends
        self._saved = 0.0 if device.synchronous else 1 - device.overlap_cost
        self._tables: dict[tuple[Split, AxisGroups], LayerTable] = {}

    def table(self, split: Split, groups: AxisGroups) -> LayerTable:
        key = (split, groups)
        if key not in self._tables:
            costs = [self.workload.cost(run, split) for run in range(len(self.workload.runs))]
            times = tuple(self._time(cost, split, groups) for cost in costs)
            recompute_bytes = 0.0
            if split.recompute != "none":
                whole = split._replace(recompute="none")
                recompute_bytes = max(
                    self.workload.cost(run, whole).activation_bytes - cost.activation_bytes
                    for run, cost in enumerate(costs)
                )
            columns = {name: tuple(getattr(cost, name) for cost in costs) for name in _COLUMNS}
            self._tables[key] = LayerTable(
                times=times,
                seconds=tuple(time.seconds for time in times),
                **columns,
                largest_tensor=max(cost.largest_tensor for cost in costs),
                recompute_bytes=recompute_bytes,
            )
        return self._tables[key]

    def _time(self, cost: LayerCost, split: Split, groups: AxisGroups) -> LayerTime:
        again = cost.forward_messages if split.recompute == "full" and cost.recompute else ()
        there = self._messages(cost.forward_messages, groups)
        back = self._messages(cost.backward_messages, groups)
        once_more = self._messages(again, groups)
        kernels, hide = self._kernels, split.hide
        forward = kernels.time(cost.forward, False, _sum_s(there, hide), len(cost.forward_messages))
        both = (*cost.backward_input, *cost.backward_weight)
        backward = kernels.time(both, True, _sum_s(back, hide), len(cost.backward_messages))
        recompute = kernels.time(cost.recompute, False, _sum_s(once_more, hide), len(again))
        messages = [
            CollectiveTime(a.seconds + b.seconds + c.seconds, a.bound or b.bound or c.bound)
            for a, b, c in zip(there, back, once_more, strict=True)
        ]
        passes = (forward, backward, recompute)
        lone_s = self._hide(messages, passes, split) if hide else 0.0
        total = sum(one.seconds for one in passes) + _sum_s(messages)
        # of the device's work in backward, what makes gradients of weights
        weights = kernels.busy_s(cost.backward_weight, True)
        all_s = weights + kernels.busy_s(cost.backward_input, True)
        weight_s = backward.seconds * weights / all_s if weights else 0.0
        hiding_s = sum(self._hidden_s(message, groups) for message in cost.backward_messages)
        calls = (*cost.forward_messages, *cost.backward_messages, *again)
        meetings = sum(groups[MESSAGE_AXES.index(call.axis)].size > 1 for call in calls)
        spent = (total, forward, backward, weight_s, recompute, tuple(messages))
        return LayerTime(*spent, hiding_s, meetings, lone_s)

    def _hide(
        self, messages: list[CollectiveTime], passes: Sequence[KernelTime], split: Split
    ) -> float:
        """Take off what runs beside computing; what of it another micro-batch hides.

        Calls of tp go block by block beside products, all but the first block; all-to-alls of ep
        beside anything that another micro-batch computes.
        """
        busy_s = {
            "tp": sum(one.compute_s for one in passes) * (split.tp - 1) / split.tp,
            "ep": sum(one.compute_s + one.memory_s for one in passes),
        }
        saved_s = 0.0
        for axis in ("tp", "ep"):
            if axis in split.hide:
                at = MESSAGE_AXES.index(axis)
                saved_s = min(self._saved * messages[at].seconds, busy_s[axis])
                messages[at] = messages[at]._replace(seconds=messages[at].seconds - saved_s)
        return saved_s if "ep" in split.hide else 0.0

    def _messages(
        self, messages: tuple[LayerMessage, ...], groups: AxisGroups
    ) -> list[CollectiveTime]:
        spent = [CollectiveTime(0.0, "")] * len(MESSAGE_AXES)
        device = self.network.cluster.device
        for message in messages:
            axis = MESSAGE_AXES.index(message.axis)
            took = self.network.collective(message.kind, groups[axis], message.bytes)
            left_s = took.seconds - self._hidden_s(message, groups)
            if groups[axis].size > 1 and device.synchronous:
                left_s += device.meet_s  # CPU workers, which have computed, wait for each other
            spent[axis] = CollectiveTime(spent[axis].seconds + left_s, took.bound)
        return spent

    def _hidden_s(self, message: LayerMessage, groups: AxisGroups) -> float:
        """The computing beside a message: all rounds of a ring but the last one send meanwhile.

        The message slows it down. Launches hide nothing: the host launches messages, too.
        """
        if not message.beside or not self._saved:
            return 0.0
        group = groups[MESSAGE_AXES.index(message.axis)]
        took = self.network.collective(message.kind, group, message.bytes)
        busy_s = self.network.cluster.device.forward_pace * self._kernels.busy_s(message.beside)
        beside_s = busy_s * (group.size - 1) / group.size
        return min(self._saved * took.seconds, beside_s)


def _sum_s(messages: Iterable[CollectiveTime], hide: tuple[str, ...] = ()) -> float:
    """Of all axes, or of those that computing waits for."""
    pairs = zip(MESSAGE_AXES, messages, strict=True)
    return sum(one.seconds for axis, one in pairs if axis not in hide)
