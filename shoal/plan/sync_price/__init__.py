"""What is asked about the replicas of a step, and what a device alone takes for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import UPDATE_KERNELS, Device
from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.step.collective_time import CollectiveTime, Network, RankGroup
from shoal.plan.step.stragglers import expected_max, quantile_of_max
from shoal.plan.workloads import Precision, StoredRows
from shoal.schedules.steps.catalog import step_of
from shoal.schedules.steps.step import StepSchedule, What, Where
from shoal.schedules.steps.tensor_layout import EvenLayout, Layout, TensorLayout
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.base import SyncTerm

_ID_BYTES = 8  # of a row that is asked for
_MOST_RANKS = 64  # whose steps are looked at
_LOW_SHARE = 0.1  # of steps that are faster than the low end of a spread; as many are above it
_SHOWN = (What.PARAMETERS, What.GRADIENTS, What.OPTIMIZER)
Made = TypeVar("Made")
Zero3 = Literal["shoal", "deepspeed"]  # whose zero(3): how it gathers


@dataclass(frozen=True)
class SyncQuestion:
    """One replica's share of the question: its device with the most parameters decides."""

    network: Network
    group: RankGroup  # the replicas of one device: the dp axis
    parameters: float  # numbers on the device, before replicas divide them
    precision: Precision
    compute_s: float  # of the step before replicas agree
    backward_s: float  # of the last micro-batch, during which gradients can be sent
    microbatches: int
    workers: int
    tensors: TensorLayout | None = None  # exact sizes, where the model is known
    layer_parameters: float = 0.0  # numbers of the largest layer on the device
    untrained_bytes: float = 0.0  # buffers and frozen parameters
    is_stage: bool = False  # of a pipeline: gradients are added up at the parameters
    adds_up: bool = False  # so they are under ep, over its workers
    adjacent_parameters: float = 0.0  # numbers of two layers, one of which follows the other
    largest_tensor: float = 0.0  # numbers; 0: not known
    meetings: int = 0  # calls of a step in which the workers of a replica wait for each other
    zero3_of: Zero3 = "shoal"
    row_tables: tuple[StoredRows, ...] = ()
    samples: float = 1.0  # of a micro-batch of a replica
    late_s: tuple[float, ...] = ()  # how much longer each slow replica computes than the others

    @property
    def cluster(self) -> Cluster:
        return self.network.cluster

    @property
    def node(self) -> Node:
        return self.network.cluster.node

    @property
    def device(self) -> Device:
        return self.network.cluster.device

    @property
    def replicas(self) -> int:
        return self.group.size

    @property
    def each(self) -> int:
        """Workers of a replica."""
        return max(1, self.workers // self.group.size)

    @property
    def on_one_host(self) -> bool:
        return self.workers <= self.node.devices

    @property
    def width(self) -> int:
        """Bytes of one number of a gradient."""
        return self.precision.gradient_bytes

    @property
    def gradient_bytes(self) -> float:
        return self.parameters * self.precision.gradient_bytes

    @property
    def parameter_bytes(self) -> float:
        return self.parameters * self.precision.parameter_bytes

    @property
    def state_width(self) -> int:
        return self.precision.master_bytes + self.precision.state_bytes

    @property
    def state_bytes(self) -> float:
        return self.parameters * self.state_width

    @cached_property
    def sizes(self) -> Layout:
        if self.tensors is not None:
            return self.tensors
        pair = self.adjacent_parameters or 2 * self.layer_parameters
        layer = self.layer_parameters
        return EvenLayout(self.parameters, self.width, layer, pair, self.largest_tensor)

    @property
    def body(self) -> float:
        """Elements of the flat buffer behind its header."""
        return self.sizes.size - self.sizes.offset

    @property
    def buffer_bytes(self) -> float:
        """Of the flat buffer of gradients, with the loss and a flag for every tensor."""
        return self.sizes.size * self.width

    @cached_property
    def row_traffic(self) -> tuple[float, float]:
        """Bytes of rows that a worker pulls in a step, and of gradients that it pushes."""
        pulled = pushed = 0.0
        for table in self.row_tables:
            width = table.row_bytes + _ID_BYTES
            pulled += self.microbatches * width * table.seen(self.samples)
            pushed += width * table.seen(self.microbatches * self.samples)
        return pulled, pushed

    @property
    def row_bytes(self) -> float:
        """Of all tables, with the state of their optimizers."""
        return sum(table.bytes for table in self.row_tables)

    @property
    def accumulates(self) -> bool:
        return self.microbatches > 1 or self.adds_up

    def collective(self, kind: str, num_bytes: float) -> CollectiveTime:
        """Of the replicas of one device."""
        return self.network.collective(kind, self.group, num_bytes)

    @property
    def on_cores(self) -> bool:
        """Whether workers are CPU processes, which also do the copying and adding themselves."""
        return self.device.synchronous

    @property
    def idle_share(self) -> float:
        """The share of a worker's communication that costs its computation nothing."""
        if not self.on_cores:
            return 1.0
        threads = self.device.threads
        if self.node.cores is None or threads is None:
            return 0.0
        workers = min(self.workers, self.node.devices)
        return max(0.0, 1 - workers * threads / self.node.cores)

    @property
    def hidden_s(self) -> float:
        """How much of backward can hide communication; on CPUs only idle cores send meanwhile."""
        return self.backward_s * self.idle_share

    def meetings_s(self, calls: int) -> float:
        """What CPU workers that compute between calls wait for each other in them."""
        return calls * self.device.meet_s if self.on_cores else 0.0

    def update_part(self, share: float = 1.0) -> Part:
        """The optimizer reads gradients and state and writes state and parameters."""
        tensors = share * self.sizes.tensors
        numbers = share * self.parameters
        return Part("update", update_s(self.device, self.precision, numbers, tensors), "memory")

    @property
    def latest_s(self) -> float:
        return max(self.late_s, default=0.0)

    def mean_step_s(self, step_s: float) -> float:
        """Of replicas that do not wait for each other: the time of a step at their mean pace."""
        if not self.late_s:
            return step_s
        quick = (self.replicas - len(self.late_s)) / step_s
        return self.replicas / (quick + sum(1 / (step_s + late_s) for late_s in self.late_s))

    def waiting_part(self, steps: int = 1) -> Part:
        """What all wait for the slowest of them: in every step, or after so many."""
        factor = expected_max(self.cluster.noise, self.workers, steps) + self._meeting_share()
        return Part("stragglers", (factor - 1) * self.compute_s, "noise of the slowest worker")

    def _meeting_share(self) -> float:
        """What workers of a replica wait for each other between its calls, over that of a step.

        On a host's cores the noise of a part of a step is independent of that of the next part,
        so that an n-th of the step has sqrt(n) times its relative deviation. GPUs differ for long.
        Where meetings were measured, their time has it.
        """
        noise = self.cluster.noise
        is_measured = not self.on_cores or self.device.meet_s
        if self.meetings < 2 or not noise.jitter or is_measured:
            return 0.0
        parts = replace(noise, jitter=noise.jitter * math.sqrt(self.meetings))
        return expected_max(parts, self.each) - expected_max(noise, self.each)

    def synchronous_spread(self) -> tuple[float, float]:
        """How far steps of workers that wait for each other lie from their mean: 80% of them."""
        noise = self.cluster.noise
        mean = expected_max(noise, self.workers)
        low = quantile_of_max(noise, self.workers, _LOW_SHARE)
        high = quantile_of_max(noise, self.workers, 1 - _LOW_SHARE)
        return max(0.0, mean - low) * self.compute_s, max(0.0, high - mean) * self.compute_s

    @cached_property
    def model(self) -> WorkerModel:
        """What the worker trains whose memory decides."""
        return WorkerModel(
            self.sizes,
            state=[size * self.state_width for size in self.sizes.sizes],
            parameter_bytes=self.precision.parameter_bytes,
            untrained=self.untrained_bytes,
            microbatches=self.microbatches,
            accumulates=self.accumulates,
            is_cast=True,  # where the layout says of what
            is_stage=self.is_stage,
            on_one_host=self.on_one_host,
            on_cpu=self.on_cores and self.on_one_host,
        )

    def steps(self, term: SyncTerm, shares_weights: bool = True) -> list[StepSchedule]:
        """Of all replicas that differ: of many the first ones stand for the others."""
        differ: Any = term.mixing_graph
        if self.tensors is not None:  # a worker each that holds other tensors
            differ = differ or term.shards_state or getattr(term, "placement", "") == "workers"
        ranks = min(self.replicas, _MOST_RANKS) if differ else 1
        return self.once(_steps, term, ranks, self.microbatches, self.workers, shares_weights)

    def busiest_step(self, term: SyncTerm) -> StepSchedule:
        """What is priced: each exchange as the worker has it that exchanges most.

        Calls were measured on workers that share no weights, so these are what is priced.
        """
        steps = self.steps(term, shares_weights=False)
        exchanges = zip(*(step.exchanges for step in steps), strict=True)
        copies = zip(*(step.host_copies for step in steps), strict=True)
        return steps[0]._replace(
            exchanges=tuple(max(of, key=lambda one: one.num_bytes) for of in exchanges),
            host_copies=tuple(max(of, key=lambda one: one.num_bytes) for of in copies),
            updated=max(step.updated for step in steps),
        )

    def memory(self, term: SyncTerm) -> DeviceMemory:
        """Of the fullest replica, without activations."""
        return max((self._memory_of(step) for step in self.steps(term)), key=lambda one: one.total)

    def _memory_of(self, step: StepSchedule) -> DeviceMemory:
        if self.on_cores:  # one memory
            step = step._replace(
                held=tuple(held._replace(where=Where.WORKER) for held in step.held)
            )
        shown = {what: step.bytes_of(what) for what in _SHOWN}
        return DeviceMemory(
            **{what.value: num_bytes for what, num_bytes in shown.items()},
            buffers=sum(map(step.bytes_of, What)) - sum(shown.values()),
            servers=max(step.servers, default=0.0) * self.each,
            host=step.host_bytes,
        )

    def sent_bytes(self, term: SyncTerm) -> float:
        """By a worker in a step, the mean."""
        steps = self.steps(term)
        return sum(step.sent_bytes(self.replicas) for step in steps) / len(steps)

    def once(self, make: Callable[..., Made], *asked: Any) -> Made:
        """What is the same however long a replica computes, and in how many micro-batches."""
        more = (self.parameters, self.accumulates, self.is_stage, self.zero3_of)
        key = (make, self.group, self.sizes, *more, *asked)
        known = self.network.shared
        if key not in known:
            known[key] = make(self, *asked)
        return cast(Made, known[key])

    def beside_s(self, all_s: float, alone_s: float, hiding_s: float) -> float:
        """What communication adds to kernels that hide it, all but the call that is alone.

        It makes them longer; where they end before it, it is waited for all the same.
        """
        alone_s = min(alone_s, all_s)
        rest_s = all_s - alone_s
        return alone_s + max(self.device.overlap_cost * rest_s, rest_s - hiding_s)


def _steps(
    question: SyncQuestion,
    term: SyncTerm,
    ranks: int,
    microbatches: int,
    workers: int,
    shares_weights: bool,
) -> list[StepSchedule]:
    model = question.model
    if not shares_weights:
        model = replace(model, takes_slices=False, on_cpu=question.on_cores)
    return [step_of(term, model, question.replicas, rank) for rank in range(ranks)]


def update_s(
    device: Device, precision: Precision, parameters: float, tensors: float = 0.0
) -> float:
    """Seconds of an update of so many numbers; on a CPU several kernels run for each tensor."""
    states = precision.master_bytes + precision.state_bytes
    width = precision.gradient_bytes + 2 * states + 2 * precision.parameter_bytes
    moved = parameters * width
    rate = device.update_bytes_per_s
    if precision.state_bytes <= 4 and device.momentum_bytes_per_s is not None:
        rate = device.momentum_bytes_per_s
    moving_s = device.pass_s(moved) if rate is None else moved / rate
    kernels = UPDATE_KERNELS["sgd" if precision.state_bytes <= 4 else "adam"]
    launches_s = tensors * kernels * device.update_launch_s if device.synchronous else 0.0
    return device.update_pace * (moving_s + launches_s)
