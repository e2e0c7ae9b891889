"""What a way to agree adds to a step: time that backward does not hide, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.cluster.cluster import Cluster
from shoal.plan.collective_time import Network
from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.rank_order import RankGroup
from shoal.plan.workload import Precision


@dataclass(frozen=True)
class Agreement:
    """One replica's share of the question: its device with the most parameters decides."""

    network: Network
    group: RankGroup  # the replicas of one device: the dp axis
    parameters: float  # numbers on the device, before replicas divide them
    precision: Precision
    compute_s: float  # of the step before replicas agree
    backward_s: float  # of the last micro-batch, during which gradients can be sent
    microbatches: int
    workers: int

    @property
    def cluster(self) -> Cluster:
        return self.network.cluster

    @property
    def gradient_bytes(self) -> float:
        return self.parameters * self.precision.gradient_bytes

    @property
    def parameter_bytes(self) -> float:
        return self.parameters * self.precision.parameter_bytes

    @property
    def state_bytes(self) -> float:
        return self.parameters * (self.precision.master_bytes + self.precision.state_bytes)


@dataclass(frozen=True)
class SyncPrice:
    """`parts` lengthen the step. Workers that do not wait have a rate of their own."""

    parts: tuple[Part, ...]
    memory: DeviceMemory  # without activations
    steps_per_batch: float = 1.0  # updates that one global batch of samples gives
    convergence: str = ""


Pricer = Callable[[Any, Agreement], SyncPrice]  # of a term's options
PRICERS: dict[str, Pricer] = {}


def prices(name: str) -> Callable[[Pricer], Pricer]:
    """Register the price of the sync term of this name."""

    def register(pricer: Pricer) -> Pricer:
        PRICERS[name] = pricer
        return pricer

    return register


def update_part(question: Agreement, share: float = 1.0) -> Part:
    """The optimizer reads gradients and state and writes state and parameters."""
    device = question.cluster.device
    moved = share * (
        question.gradient_bytes + 2 * question.state_bytes + 2 * question.parameter_bytes
    )
    rate = device.update_bytes_per_s
    if rate is None:
        rate = device.memory_bytes_per_s * device.memory_efficiency.at(max(1.0, moved))
    return Part("update", moved / rate, "memory")


def exposed(communication_s: float, hidden_behind_s: float, bucket_s: float) -> float:
    """What is left of communication that runs beside backward; its last bucket is never hidden."""
    return max(communication_s - hidden_behind_s, min(bucket_s, communication_s))
