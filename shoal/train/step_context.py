"""What a job knows about every step that it builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.observe.trace import Tracer
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults
from shoal.strategy.strategy import Strategy


@dataclass(frozen=True)
class StepContext:
    """What a job knows about every step that it builds."""

    strategy: Strategy
    mesh: Mesh
    device: torch.device
    seed: int
    tracer: Tracer
    say: Callable[[str], None]
    faults: Faults | None = None
    config: RunConfig = field(default_factory=RunConfig)
    before_build: Sequence[Callable[[nn.Module], None]] = ()

    @property
    def has_replicas(self) -> bool:
        """Whether there are several replicas, or will be: an elastic group forms later."""
        return self.mesh.dp.size > 1 or self.strategy.is_elastic

    @property
    def is_split(self) -> bool:
        """Whether a replica is split over several workers."""
        return self.mesh.replica_group.size > 1
