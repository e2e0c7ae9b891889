"""Start a script on workers that time the passes of its model, and read what they found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from shoal.errors import BadInput
from shoal.plan.profile import ModelProfile
from shoal.runtime.config import PROFILE, RunConfig, WorkloadTraceConfig
from shoal.runtime.files import scratch_folder

PROFILE_S = 3.0
ScriptRun = Callable[[int, RunConfig], object]  # the script on so many workers, without its output


def measure_profile(
    run: ScriptRun, config: RunConfig, workers: int, seconds: float = PROFILE_S
) -> ModelProfile:
    """Passes of the script's first batch, which `workers` share and compute at the same time."""
    with scratch_folder("profile") as folder:
        asked = WorkloadTraceConfig(folder, seconds)
        strategy = "ddp" if workers > 1 else "single"
        run(workers, replace(config, strategy=strategy, workload_trace=asked))
        file = folder / PROFILE
        if not file.is_file():
            raise BadInput("the script has ended without a step of job.step to profile")
        return msgspec.json.decode(file.read_bytes(), type=ModelProfile)
