"""`strategy="auto"`: measure this machine once, plan for the script's own model, and choose.

What is chosen equals one device's result, and is one that the notation alone can say.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoal.cluster import Cluster
from shoal.cluster.units import show_seconds
from shoal.errors import BadInput, ShoalError
from shoal.observe.calibration.measure import calibrated_cluster
from shoal.plan.explain import nothing_fits, why_first
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.profile import ModelProfile, profiled
from shoal.plan.search import AS_FAST, SearchOptions, search
from shoal.plan.workloads import Workload
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.runtime.config import PROFILE, RunConfig, WorkloadTraceConfig
from shoal.runtime.decoders import decode_json
from shoal.runtime.files import scratch_folder
from shoal.runtime.run_dir import read
from shoal.strategy.strategy import Strategy, as_strategy

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
        return decode_json(file.read_bytes(), ModelProfile)


Say = Callable[[str], None]


def choose_strategy(workers: int, config: RunConfig, run: ScriptRun, say: Say) -> Strategy:
    """The fastest strategy for the script on this machine; ddp where its model cannot be traced."""
    if workers == 1:
        say("auto: single, for there is one worker")
        return as_strategy("single")
    try:
        workload, batch = traced(config, run)
    except ShoalError as error:
        say(f"auto: ddp, for {error}")
        return as_strategy("ddp")
    cluster = calibrated_cluster(say=say, device=config.device).of_size(workers)
    with suppress(BadInput):  # then the machine's figures alone decide
        cluster = profiled(cluster, workload, [measure_profile(run, config, workers)])
    return planned(workload, batch, cluster, workers, say)


def traced(config: RunConfig, run: ScriptRun) -> tuple[TracedWorkload, int]:
    """The model of the script and the samples of its batch."""
    with scratch_folder("auto") as folder:
        trace = WorkloadTraceConfig(folder)
        run(1, replace(config, strategy="single", device="cpu", workload_trace=trace))
        return read_trace(folder)


def read_trace(folder: Path) -> tuple[TracedWorkload, int]:
    file = folder / "workload.json"
    if not file.is_file():
        raise BadInput("the script has ended without a training step of job.step")
    document = read(file) or {"error": "its trace cannot be read"}
    if "error" in document:
        raise BadInput(f"the model could not be traced: {document['error']}")
    return TracedWorkload.from_json(document["workload"].encode()), int(document["batch"])


def planned(workload: Workload, batch: int, cluster: Cluster, workers: int, say: Say) -> Strategy:
    options = SearchOptions(PlanSettings(batch), notation_only=True)
    result = search(workload, cluster, workers, options)
    if not result.ranked:
        raise BadInput(nothing_fits(result.least, result.least_workers))
    best = result.ranked[0]
    strategy = best.candidate.strategy
    prediction = best.prediction
    with suppress(BadInput):  # what people know, where it fits and is as fast
        ddp = as_strategy("ddp")
        plain = Predictor(workload, cluster).predict(ddp, workers, PlanSettings(batch))
        if plain.fits and plain.step_s <= best.seconds * AS_FAST:
            strategy = ddp
            prediction = plain
    spread = f"{show_seconds(prediction.low_s)} to {show_seconds(prediction.high_s)}"
    step = f"{show_seconds(prediction.step_s)} a step ({spread})"
    say(f"auto: {strategy}, {step}: {why_first(prediction)}")
    return strategy
