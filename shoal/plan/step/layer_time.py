"""How long the layers of a workload take on a cluster: kernels, launches and messages.

The host launches kernels and collectives one after the other; where they run faster than they are
launched, launching them is the layer's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.cluster.hardware import UPDATE_KERNELS, Device
from shoal.cluster.program import FUSED, ModelProgram
from shoal.plan.step.collective_time import CollectiveTime, Network, RankGroup
from shoal.plan.sync_price import update_s
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
    """Times kernels of one data type and program on a device; remembers those it has timed."""

    def __init__(self, device: Device, dtype: str, program: ModelProgram = FUSED):
        self.device = device
        self.dtype = dtype
        self.program = program
        self._peak = device.flops_of(dtype)
        self._known: dict[tuple[float, ...], tuple[float, float]] = {}
        self._named: dict[str, tuple[float, float]] = {}  # factor and peak of a kernel
        self._timed: dict[tuple[object, ...], KernelTime] = {}

    def busy(self, kernel: Kernel, backward: bool = False) -> tuple[float, float]:
        """Seconds of one kernel on the device: (bound by compute, bound by memory)."""
        device = self.device
        name = kernel.name
        if name not in self._named:
            is_wide = self.dtype == "fp8" and name.partition(" ")[0] in _NOT_FP8
            peak = device.flops_of("bf16") if is_wide else self._peak
            self._named[name] = device.factor_of(name), peak
        factor, peak = self._named[name]
        is_attention = name.removesuffix(" backward").endswith("attention")
        key = (*kernel[1:], factor, peak, backward, is_attention, name.startswith(GROUPED))
        if key not in self._known:
            compute_s = 0.0
            memory_s = factor * device.pass_s(kernel.bytes)
            if kernel.flops:
                share = self._attention_share(kernel, backward) if is_attention else None
                if share is None:
                    share = self._share(kernel, backward) / factor
                compute_s = kernel.flops / (peak * share)
            is_longer = compute_s >= memory_s and kernel.flops > 0
            compute_s, memory_s = (compute_s, 0.0) if is_longer else (0.0, memory_s)
            if self.dtype == "fp8" and peak > device.flops_of("bf16") and kernel.flops:
                # both operands are read in bf16, scaled and written
                operands = kernel.batch * kernel.k * (kernel.m + kernel.n)
                memory_s += device.pass_s(3 * operands)
            if self.program.kernels != "fused":
                memory_s += device.gap_s
            self._known[key] = compute_s, memory_s
        return self._known[key]

    def _share(self, kernel: Kernel, backward: bool) -> float:
        """Of the peak."""
        device = self.device
        rows = kernel.m * kernel.batch
        is_grouped = kernel.name.startswith(GROUPED)
        if self.program.kernels != "fused" and device.products and not is_grouped:
            return device.product_share(rows, kernel.n, kernel.k)
        curve = device.matmul_efficiency
        if backward and device.backward_matmul_efficiency is not None:
            curve = device.backward_matmul_efficiency
        if is_grouped:
            return _GROUP_SHARE * curve.at(kernel.flops / kernel.batch)
        return curve.at(kernel.flops)

    def _attention_share(self, kernel: Kernel, backward: bool) -> float | None:
        chosen = self.program.attention
        if chosen is None:
            return None
        return self.device.attention_share(chosen, kernel.k, kernel.n, backward)

    def launch_s(self, backward: bool) -> float:
        """The host's time for a kernel."""
        device = self.device
        own = device.launches_s.get(self.program.kernels + " backward" * backward)
        if own is not None:
            return own
        if backward and device.backward_launch_s is not None:
            return device.backward_launch_s
        return device.launch_s

    def host_share(
        self, passes: Iterable[tuple[int, tuple[Kernel, ...], bool]], update_s: float = 0.0
    ) -> float:
        """Of what launches are longer than kernels, what others do not make up for.

        `update_s` is what the host needs longer for the update. A host that does not wait runs
        ahead of a GPU where its kernels are long.
        """
        if self.program.kernels == "fused" or self.device.synchronous:
            return 1.0
        longer = max(0.0, update_s)
        shorter = max(0.0, -update_s)
        for count, kernels, backward in passes:
            more = len(kernels) * self.launch_s(backward) - self.busy_s(kernels, backward)
            longer += count * max(0.0, more)
            shorter += count * max(0.0, -more)
        return max(0.0, longer - shorter) / longer if longer else 1.0

    def time(
        self,
        kernels: tuple[Kernel, ...],
        backward: bool = False,
        sending_s: float = 0.0,
        messages: int = 0,
        host: float = 1.0,
    ) -> KernelTime:
        """Kernels, beside messages that the host launches, too, and the device waits for."""
        key = (kernels, backward, sending_s, messages, host)
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
        pace = device.backward_pace if backward else device.forward_pace
        launches_s = count * self.launch_s(backward)
        if not device.synchronous:
            launches_s = host * max(0.0, launches_s - (compute_s + memory_s + sending_s))
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
    passing_bytes: float  # of one layer, while it is computed again or its backward runs


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
        self._models: dict[ModelProgram, KernelModel] = {}
        # of a message, what kernels beside it get done; a CPU computes or sends
        self._saved = 0.0 if device.synchronous else 1 - device.overlap_cost
        self._tables: dict[tuple[Split, AxisGroups], LayerTable] = {}

    def table(self, split: Split, groups: AxisGroups) -> LayerTable:
        key = (split, groups)
        if key not in self._tables:
            costs = [self.workload.cost(run, split) for run in range(len(self.workload.runs))]
            kernels = self._model(split.program)
            host = kernels.host_share(self._passes(costs), self._launching_update_s(costs, split))
            times = tuple(self._time(cost, split, groups, host) for cost in costs)
            is_cpu = self.network.cluster.device.synchronous
            passing_bytes = 0.0 if is_cpu else max(cost.passing_bytes for cost in costs)
            if split.recompute != "none":
                whole = split._replace(recompute="none")
                again_bytes = max(
                    self.workload.cost(run, whole).activation_bytes - cost.activation_bytes
                    for run, cost in enumerate(costs)
                )
                passing_bytes = max(passing_bytes, again_bytes)
            columns = {name: tuple(getattr(cost, name) for cost in costs) for name in _COLUMNS}
            self._tables[key] = LayerTable(
                times=times,
                seconds=tuple(time.seconds for time in times),
                **columns,
                largest_tensor=max(cost.largest_tensor for cost in costs),
                passing_bytes=passing_bytes,
            )
        return self._tables[key]

    def _model(self, program: ModelProgram) -> KernelModel:
        if program not in self._models:
            device = self.network.cluster.device
            compute = self.workload.precision.compute
            self._models[program] = KernelModel(device, compute, program)
        return self._models[program]

    def _launching_update_s(self, costs: Sequence[LayerCost], split: Split) -> float:
        """What the host needs for an optimizer of several kernels, more than the GPU."""
        device = self.network.cluster.device
        pairs = list(zip(self.workload.runs, costs, strict=True))
        numbers = sum(run.count * cost.parameters for run, cost in pairs)
        calls = sum(run.count * cost.tensors for run, cost in pairs) * UPDATE_KERNELS["adam"]
        host_s = calls * device.update_launch_s if split.program.update == "foreach" else 0.0
        return host_s - update_s(device, self.workload.precision, numbers)

    def _passes(self, costs: Sequence[LayerCost]) -> Iterator[tuple[int, tuple[Kernel, ...], bool]]:
        for run, cost in zip(self.workload.runs, costs, strict=True):
            yield run.count, (*cost.forward, *cost.recompute), False
            yield run.count, (*cost.backward_input, *cost.backward_weight), True

    def _time(self, cost: LayerCost, split: Split, groups: AxisGroups, host: float) -> LayerTime:
        again = cost.forward_messages if split.recompute == "full" and cost.recompute else ()
        kernels = self._model(split.program)
        hide = split.hide
        there, back, once_more = (
            self._messages(messages, groups, kernels)
            for messages in (cost.forward_messages, cost.backward_messages, again)
        )
        forward = kernels.time(
            cost.forward, False, _sum_s(there, hide), len(cost.forward_messages), host
        )
        both = (*cost.backward_input, *cost.backward_weight)
        backward = kernels.time(both, True, _sum_s(back, hide), len(cost.backward_messages), host)
        recompute = kernels.time(cost.recompute, False, _sum_s(once_more, hide), len(again), host)
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
        hiding_s = sum(self._hidden_s(one, groups, kernels) for one in cost.backward_messages)
        calls = (*cost.forward_messages, *cost.backward_messages, *again)
        meetings = sum(groups[MESSAGE_AXES.index(call.axis)].size > 1 for call in calls)
        return LayerTime(
            total,
            forward,
            backward,
            weight_s,
            recompute,
            tuple(messages),
            hiding_s,
            meetings,
            lone_s,
        )

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
        self, messages: tuple[LayerMessage, ...], groups: AxisGroups, kernels: KernelModel
    ) -> list[CollectiveTime]:
        spent = [CollectiveTime(0.0, "")] * len(MESSAGE_AXES)
        device = self.network.cluster.device
        for message in messages:
            axis = MESSAGE_AXES.index(message.axis)
            took = self.network.collective(message.kind, groups[axis], message.bytes)
            left_s = took.seconds - self._hidden_s(message, groups, kernels)
            if groups[axis].size > 1 and device.synchronous:
                left_s += device.meet_s  # CPU workers, which have computed, wait for each other
            spent[axis] = CollectiveTime(spent[axis].seconds + left_s, took.bound)
        return spent

    def _hidden_s(self, message: LayerMessage, groups: AxisGroups, kernels: KernelModel) -> float:
        """The computing beside a message: all rounds of a ring but the last one send meanwhile.

        The message slows it down. Launches hide nothing: the host launches messages, too.
        """
        if not message.beside or not self._saved:
            return 0.0
        group = groups[MESSAGE_AXES.index(message.axis)]
        took = self.network.collective(message.kind, group, message.bytes)
        busy_s = self.network.cluster.device.forward_pace * kernels.busy_s(message.beside)
        beside_s = busy_s * (group.size - 1) / group.size
        return min(self._saved * took.seconds, beside_s)


def _sum_s(messages: Iterable[CollectiveTime], hide: tuple[str, ...] = ()) -> float:
    """Of all axes, or of those that computing waits for."""
    pairs = zip(MESSAGE_AXES, messages, strict=True)
    return sum(one.seconds for axis, one in pairs if axis not in hide)
