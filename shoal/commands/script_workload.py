"""The workload of a script: its own model, batch and optimizer, traced without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shoal.commands.launching import check_trained, command_for, config_for, run_quietly
from shoal.errors import BadInput
from shoal.launch.auto import measure_profile
from shoal.plan.profile import ModelProfile
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.workload import Precision
from shoal.runtime.config import WorkloadTraceConfig
from shoal.runtime.files import scratch_folder
from shoal.strategy.strategy import as_strategy


class ScriptWorkload(NamedTuple):
    workload: TracedWorkload
    batch: int  # samples of the script's global batch
    precision: Precision


def workload_of_script(script: str, args: Sequence[str] | None = None) -> ScriptWorkload:
    """Run a script, or an example, up to its first step, on tensors without memory."""
    command = command_for(script, args)
    with scratch_folder("workload") as folder:
        config = config_for(as_strategy("single"), device="cpu")
        run_quietly(command, 1, replace(config, workload_trace=WorkloadTraceConfig(folder)))
        document = _read(folder, script)
    workload = TracedWorkload.from_json(document["workload"].encode())
    return ScriptWorkload(workload, int(document["batch"]), workload.precision)


def profile_of_script(
    script: str, args: Sequence[str] | None, workers: int, device: str | None = None
) -> ModelProfile:
    """Start a script on so many workers, which time the passes of its model."""
    run = partial(run_quietly, command_for(script, args))
    return measure_profile(run, config_for(as_strategy("single"), device=device), workers)


def _read(folder: Path, script: str) -> dict[str, str]:
    file = folder / "workload.json"
    check_trained(file)
    document: dict[str, str] = json.loads(file.read_text())
    if "error" in document:
        raise BadInput(f"the model of {script} could not be traced: {document['error']}")
    return document
