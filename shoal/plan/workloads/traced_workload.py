"""A workload that was traced from a module: kernels of every layer at two sizes of a batch.

A kernel's size at any other micro-batch lies on the line through both, so that costs that do not
grow with the batch (reading weights, writing a gradient) stay what they are. Under tp the sizes of
split layers, and of what is computed between a column and a row layer, are divided; the others
run whole on every rank. `tracing/module.py` makes these values; nothing here needs torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from shoal.plan.workloads import (
    UNSPLIT,
    HeldTensor,
    Kernel,
    LayerCost,
    LayerMessage,
    LayerRun,
    Precision,
    Split,
    SplitLimits,
    StageTensors,
    StoredRows,
)
from shoal.runtime.decoders import decode_json


def stage_tensors(
    held: Iterable[HeldTensor], layers: Collection[int], split: Split
) -> StageTensors:
    """Of these layers; a tensor that several of them use is there once."""
    here = {tensor.name: tensor for tensor in held if tensor.layer in layers}
    trained = [tensor for tensor in here.values() if tensor.is_trained and 0 not in tensor.shape]
    others = [math.prod(tensor.shape) for tensor in here.values() if not tensor.is_trained]
    units: dict[int, list[int]] = {0: []}
    for place, tensor in enumerate(trained):
        units.setdefault(tensor.unit, []).append(place)
    return StageTensors(
        tuple(_shape(tensor, split) for tensor in trained),
        tuple(tuple(units[unit]) for unit in sorted(units)),
        frozenset(place for place, tensor in enumerate(trained) if tensor.is_cast),
        float(sum(others)),
    )


def _shape(tensor: HeldTensor, split: Split) -> tuple[int, ...]:
    """Its part on one worker. Which dimension is divided does not matter here."""
    parts = (split.tp if tensor.is_divided else 1) * (split.ep if tensor.is_expert else 1)
    first, *others = tensor.shape or (1,)
    return (max(1, -(-first // parts)), *others)


Phase = Literal["forward", "input", "weight"]  # the last two are of backward
Divided = Literal["", "column", "row", "all"]  # what tp divides: a layer's outputs, inputs, all


class Line(NamedTuple):
    """A number at both sizes of the batch."""

    small: float
    large: float

    def at(self, along: float) -> float:
        return self.small + along * (self.large - self.small)


_ZERO = Line(0.0, 0.0)


class TracedKernel(NamedTuple):
    small: Kernel
    large: Kernel
    phase: Phase
    divided: Divided = ""


class TracedMessage(NamedTuple):
    """What tp, cp or ep sends while a layer computes."""

    kind: str
    axis: str
    bytes: Line
    phase: Phase


@dataclass(frozen=True)
class TracedLayer:
    """One layer or block. `divided_*` is what ranks of tp share, the rest is on each of them."""

    name: str
    kernels: tuple[TracedKernel, ...]
    messages: tuple[TracedMessage, ...]
    flops: Line  # forward and backward, as papers count them
    parameters: float = 0.0
    divided_parameters: float = 0.0
    expert_parameters: float = 0.0  # of all, what ranks of ep share
    shared_parameters: float = 0.0  # of an earlier layer
    activations: Line = _ZERO
    divided_activations: Line = _ZERO
    passing: Line = _ZERO  # the largest result in backward
    input_bytes: Line = _ZERO
    output_bytes: Line = _ZERO
    count: int = 1  # equal layers, one after the other


@dataclass(frozen=True)
class TracedWorkload:
    """A `Workload`; a sample is one row of the batch."""

    name: str
    precision: Precision
    batches: tuple[int, int]  # rows of the two traces, the smaller one first
    layers: tuple[TracedLayer, ...]
    limits: SplitLimits = UNSPLIT  # what divides a module is not known from its operations
    held: tuple[HeldTensor, ...] = ()
    accumulate: int = 1
    row_tables: tuple[StoredRows, ...] = ()

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        return tuple(LayerRun(layer.name, layer.count) for layer in self.layers)

    @cached_property
    def _costs(self) -> dict[tuple[int, Split], LayerCost]:
        return {}

    def cost(self, run: int, split: Split) -> LayerCost:
        key = (run, split)
        if key not in self._costs:
            self._costs[key] = _Cost(self, run, split).layer_cost()
        return self._costs[key]

    def model_flops(self, samples: int, flash_attention: bool = False) -> float:
        """As papers count them: causal attention as if nothing were skipped."""
        along = _along(self.batches, samples)
        return sum(layer.count * max(0.0, layer.flops.at(along)) for layer in self.layers)

    def tensors(self, layers: tuple[int, ...], split: Split) -> StageTensors | None:
        """The first layers of each run stand for any so many of it: they are equal."""
        if not self.held:
            return None
        starts = itertools.accumulate((run.count for run in self.layers), initial=0)
        chosen = zip(starts, layers, strict=False)
        first = {start + i for start, number in chosen for i in range(number)}
        return stage_tensors(self.held, first, split)

    @property
    def parameters(self) -> float:
        return sum(run.count * (run.parameters + run.divided_parameters) for run in self.layers)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> TracedWorkload:
        return decode_json(text, cls)


def _along(batches: tuple[int, int], rows: float) -> float:
    """Where a batch lies between the two that were traced: 0 is the smaller, 1 the larger."""
    small, large = batches
    return (rows - small) / (large - small)


class _Cost:
    """One layer's cost under one split."""

    def __init__(self, workload: TracedWorkload, run: int, split: Split):
        self.layer = workload.layers[run]
        self.compute = workload.precision.compute
        self.split = split
        # ranks of cp have some positions of every sample: as many tokens as fewer samples have
        self.rows = split.microbatch / split.cp
        self.along = _along(workload.batches, self.rows)

    def layer_cost(self) -> LayerCost:
        layer = self.layer
        forward = self._kernels("forward")
        is_full = self.split.recompute == "full" and bool(forward)
        experts = self._experts() * (self.split.ep - 1)  # of others
        return LayerCost(
            forward=forward,
            backward_input=self._kernels("input"),
            backward_weight=self._kernels("weight"),
            recompute=forward if is_full else (),
            forward_messages=self._messages(("forward",)) + self._ring(forward, False),
            backward_messages=self._messages(("input", "weight"))
            + self._ring(self._kernels("input"), True),
            parameters=layer.parameters + layer.divided_parameters / self.split.tp - experts,
            activation_bytes=self._kept(is_full),
            output_bytes=self._line(layer.output_bytes) / self._sequence_parts,
            shared_parameters=layer.shared_parameters,
            expert_parameters=self._experts(),
            passing_bytes=self._line(layer.passing),
        )

    def _experts(self) -> float:
        layer = self.layer
        divided = self.split.tp if layer.divided_parameters >= layer.expert_parameters else 1
        return layer.expert_parameters / (self.split.ep * divided)

    def _ring(self, kernels: tuple[Kernel, ...], is_backward: bool) -> tuple[LayerMessage, ...]:
        """Under cp K and V of an attention go round, in backward with gradients in fp32."""
        if self.split.cp == 1:
            return ()
        width = 2 if self.compute in ("bf16", "fp16") else 4
        name = "attention backward" if is_backward else "attention"
        numbers = self.split.cp * 2 * (width + 4 * is_backward)
        found = (one for one in kernels if one.flops and one.name.endswith(name))
        return tuple(
            LayerMessage("ring_attention", "cp", numbers * one.n * one.k * one.batch, (one,))
            for one in found
        )

    @property
    def _sequence_parts(self) -> int:
        """Among how many ranks what is not split by features is divided by positions."""
        has_split = self.layer.divided_parameters > 0
        return self.split.tp if self.split.sequence_parallel and has_split else 1

    def _line(self, line: Line) -> float:
        return max(0.0, line.at(self.along))

    def _kept(self, is_full: bool) -> float:
        if is_full:
            return self._line(self.layer.input_bytes) / self._sequence_parts
        whole = self._line(self.layer.activations) / self._sequence_parts
        return whole + self._line(self.layer.divided_activations) / self.split.tp

    def _kernels(self, phase: Phase) -> tuple[Kernel, ...]:
        return tuple(self._sized(k) for k in self.layer.kernels if k.phase == phase)

    def _sized(self, traced: TracedKernel) -> Kernel:
        kernel = _between(traced.small, traced.large, self.along)
        if self.split.tp > 1 and traced.divided:
            return _divide(kernel, traced, self.split.tp)
        if self._sequence_parts > 1 and not kernel.flops:
            return kernel._replace(bytes=kernel.bytes / self._sequence_parts)
        return kernel

    def _messages(self, phases: tuple[Phase, ...]) -> tuple[LayerMessage, ...]:
        sizes = {"tp": self.split.tp, "cp": self.split.cp, "ep": self.split.ep}
        found: list[LayerMessage] = []
        for kind, axis, line, phase in self.layer.messages:
            if phase not in phases or sizes[axis] == 1:
                continue
            num_bytes = self._line(line)
            if kind == "all_reduce" and self.split.sequence_parallel:
                found.append(LayerMessage("all_gather", axis, num_bytes))
                found.append(LayerMessage("reduce_scatter", axis, num_bytes))
            else:
                found.append(LayerMessage(kind, axis, num_bytes))
        return tuple(found)


def _between(small: Kernel, large: Kernel, along: float) -> Kernel:
    """A kernel at another batch; a product's operations follow from its sizes."""
    num_bytes = max(0.0, Line(small.bytes, large.bytes).at(along))
    if not large.flops:
        return large._replace(bytes=num_bytes)
    m, n, k, batch = (
        max(1, round(Line(a, b).at(along))) for a, b in zip(small[3:], large[3:], strict=True)
    )
    share = large.flops / (2.0 * large.m * large.n * large.k * large.batch)
    flops = share * 2.0 * m * n * k * batch
    return Kernel(large.name, flops, num_bytes, m, n, k, batch)


# which of m, n, k of a product is divided, by what tp divides and the phase
_DIMENSIONS: dict[Divided, dict[Phase, str]] = {
    "column": {"forward": "n", "input": "k", "weight": "n"},
    "row": {"forward": "k", "input": "n", "weight": "m"},
    "all": {"forward": "batch", "input": "batch", "weight": "batch"},
}


def _divide(kernel: Kernel, traced: TracedKernel, tp: int) -> Kernel:
    if not kernel.flops:
        return kernel._replace(bytes=kernel.bytes / tp)
    name = _DIMENSIONS[traced.divided][traced.phase]
    size = getattr(kernel, name)
    part = max(1, -(-size // tp))  # of the fullest rank
    divided = kernel._replace(**{name: part}, flops=kernel.flops * part / size)
    return divided._replace(bytes=kernel.bytes * _elements(divided) / _elements(kernel))


def _elements(kernel: Kernel) -> float:
    """Numbers that a product reads and writes."""
    m, n, k, batch = kernel[3:]
    return float(batch) * (m * k + k * n + m * n)


def group_equal(layers: tuple[TracedLayer, ...]) -> tuple[TracedLayer, ...]:
    """Equal layers, one after the other, as one with a count; `blocks.0` to `blocks.0-11`."""

    def signature(layer: TracedLayer) -> tuple[object, ...]:
        sizes = (layer.parameters, layer.divided_parameters, layer.expert_parameters)
        return (layer.kernels, layer.messages, layer.flops, sizes, layer.output_bytes)

    found = []
    for _, equal in itertools.groupby(layers, signature):
        first, *others = run = list(equal)
        if others:
            means: dict[str, Any] = {}
            for kind in ("activations", "divided_activations"):
                sizes = zip(*(getattr(layer, kind) for layer in run), strict=True)
                means[kind] = Line(*(sum(numbers) / len(run) for numbers in sizes))
            name = f"{first.name}-{others[-1].name.rpartition('.')[2]}"
            first = replace(first, name=name, count=len(run), **means)
        found.append(first)
    return tuple(found)
