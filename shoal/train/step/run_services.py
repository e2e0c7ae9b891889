"""What surrounds a job, and what it knows about every step that it builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults, busy_s
from shoal.runtime.files import StepCount
from shoal.runtime.preemption import Preemption
from shoal.runtime.trace import INJECTED, OFF, Tracer
from shoal.strategy.strategy import Strategy
from shoal.train.callbacks import Callback
from shoal.train.progress import Progress

if TYPE_CHECKING:
    from shoal.comm.members.elastic_sum import ElasticSum
    from shoal.comm.members.meetings import Meetings
    from shoal.train.agreement import CallLog

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RunServices:
    """Progress, tracing, injected faults, and sums over survivors.

    `elastic_sum` and `step_count` are None if the loss of a rank ends the run, `meetings` if lost
    ranks do not come back. `local_rank` counts inside the host. A job that no launcher made reads
    its configuration from the environment.
    """

    progress: Progress = field(default_factory=Progress)
    tracer: Tracer = OFF
    faults: Faults | None = None
    elastic_sum: ElasticSum | None = None
    meetings: Meetings | None = None
    calls: CallLog | None = None
    preemption: Preemption | None = None
    step_count: StepCount | None = None
    callbacks: Sequence[Callback] = ()
    local_rank: int = 0
    local_size: int = 1
    config: RunConfig = field(default_factory=RunConfig.from_environment)

    def lost(self, size: int) -> list[int]:
        """The ranks that have exited, where a loss does not end the run."""
        run_dir = self.config.run_dir
        if run_dir is None or self.step_count is None:
            return []
        return [rank for rank in range(size) if run_dir.has_exited(rank)]

    def present(self, size: int) -> float:
        """The fraction of so many ranks that are there, where a loss does not end the run."""
        return 1 - len(self.lost(size)) / size


@dataclass(frozen=True)
class StepContext:
    """What a job knows about every step that it builds."""

    strategy: Strategy
    mesh: Mesh
    device: torch.device
    seed: int
    services: RunServices
    say: Callable[[str], None]
    before_build: Sequence[Callable[[nn.Module], object]] = ()

    @property
    def has_replicas(self) -> bool:
        """Whether there are several replicas, or will be: an elastic group forms later."""
        return self.mesh.dp.size > 1 or self.strategy.is_elastic

    @property
    def is_split(self) -> bool:
        """Whether a replica is split over several workers."""
        return self.mesh.replica_group.size > 1

    def with_faults(
        self, compute: Callable[P, T], step_number: Callable[[], int]
    ) -> Callable[P, T]:
        """What computes a step, with `--slow` and `--kill` around it."""
        faults = self.services.faults
        if faults is None:
            return compute
        return faults.around(compute, step_number, self._busy_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        """A trace shows it: it is neither computing nor idling."""
        with self.services.tracer.span(INJECTED, "--slow"):
            clock.sleep(seconds)

    def _busy_s(self) -> float:
        """A clock that measures computing time."""
        if self.device.type != "cuda":
            return busy_s()
        torch.cuda.synchronize(self.device)
        return clock.monotonic()
