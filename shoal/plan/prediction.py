"""What a prediction says: the parts of a step, memory by kind, and what bounds each part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from shoal.plan.goodput import Goodput


class Part(NamedTuple):
    """Seconds of a step that one activity takes on the critical path."""

    name: str  # forward, backward, recompute, tp, cp, ep, pp, bubble, gradients, servers, update, …
    seconds: float
    bound: str  # "compute", "memory", "launch", or the link: "spine uplink 1:4 (25 GB/s)"


class DeviceMemory(NamedTuple):
    """Bytes on the fullest device, by kind."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0  # of communication, gathered layers, other copies of weights
    servers: float = 0.0  # on the fullest server, where servers hold the weights
    host: float = 0.0  # in the memory of its host, of a device that offloads

    @property
    def total(self) -> float:
        """What a worker needs."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Prediction:
    """One strategy on one cluster."""

    strategy: str
    workers: int
    cluster: str
    batch: int
    step_s: float
    low_s: float  # what noise, and the error that rows of its kind had, leave open: 80%
    high_s: float
    parts: tuple[Part, ...]
    memory: DeviceMemory
    memory_limit_bytes: float
    host_limit_bytes: float | None  # for each worker of a host; None: not known
    samples_per_s: float
    mfu: float | None = None
    convergence: str = ""  # what an asynchronous or decentralized strategy costs in progress
    notes: tuple[str, ...] = ()
    microbatches: int = 1  # of a replica in a step
    goodput: Goodput | None = None  # where nodes fail

    @property
    def effective_s(self) -> float:
        """A step, with its share of what failures cost."""
        return self.step_s if self.goodput is None else self.goodput.best.effective_s

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        return self.host_limit_bytes is None or self.memory.host <= self.host_limit_bytes

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.seconds)

    def as_dict(self) -> dict[str, object]:
        useful = self.goodput.best.shares.useful if self.goodput else None
        return asdict(self) | {"memory": self.memory._asdict(), "fits": self.fits, "useful": useful}
