"""What surrounds a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.observe.progress import Progress, SilentProgress
from shoal.observe.trace import OFF, Tracer
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults
from shoal.runtime.files import StepCount
from shoal.runtime.preemption import Preemption

if TYPE_CHECKING:
    from shoal.comm.elastic import ElasticSum
    from shoal.comm.meetings import Meetings


@dataclass(frozen=True)
class RunServices:
    """Progress, tracing, injected faults, and sums over survivors.

    `elastic_sum` and `step_count` are None if the loss of a rank ends the run, `meetings` if lost
    ranks do not come back. `local_rank` counts inside the host. A job that no launcher made reads
    its configuration from the environment.
    """

    progress: Progress = field(default_factory=SilentProgress)
    tracer: Tracer = OFF
    faults: Faults | None = None
    elastic_sum: ElasticSum | None = None
    meetings: Meetings | None = None
    preemption: Preemption | None = None
    step_count: StepCount | None = None
    local_rank: int = 0
    local_size: int = 1
    config: RunConfig = field(default_factory=RunConfig.from_environment)

    def present(self, size: int) -> float:
        """The fraction of so many ranks that are there, where a loss does not end the run."""
        run_dir = self.config.run_dir
        if run_dir is None or self.step_count is None:
            return 1.0
        return sum(not run_dir.has_exited(rank) for rank in range(size)) / size
