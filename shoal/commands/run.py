"""`shoal run`: a script on many workers; `shoal train` and `shoal eval`: an example."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cluster.presets import load_cluster
from shoal.commands import launching, options
from shoal.commands.options import argument, option
from shoal.commands.output import show
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.runtime.checkpoint_folders import MANIFEST
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import say
from shoal.strategy.strategy import Strategy, as_strategy


def run(
    script: options.Script,
    asked: launching.WorkersOptions,
    args: list[str] | None = options.SCRIPT_ARGS,
    on: str | None = options.ON,
    logs: Path | None = option(
        "Write what each worker and server prints to a file of its own there: rank-0.log, "
        "server-0.log …",
        metavar="DIR",
    ),
    checkpoint: str | None = options.CHECKPOINT,
    resume: bool = option("Continue from the latest checkpoint in --server-checkpoint.", False),
    cluster: str | None = option(
        "A cluster file or preset: its racks give the order of hosts, and what is "
        "summed up inside racks first.",
        None,
        "--cluster",
        show_default="what the engine knows",
    ),
) -> None:
    """Run a training script on several workers of this host, or of an engine's (--on)."""
    if on is not None:
        launching.check_engine(on)
    command = launching.command_for(script, args)
    asked = asked.resolved(command)
    config = with_cluster(asked.to_config(on, checkpoint, resume), cluster)
    if resume and config.server_checkpoint.folder is None:
        raise BadInput("--resume goes on from --server-checkpoint DIR: give that, too")
    files = asked.files
    if asked.record is not None:
        files = replace(files, more=recorded(command, asked.workers or 1, config, cluster))
    with launching.traced(config, files.traces, asked.timeline) as config:
        launching.run_shown(command, asked.workers or 1, config, files, on, logs, asked.plain)


def recorded(
    command: Sequence[str], workers: int, config: RunConfig, cluster: str | None = None
) -> dict[str, Any]:
    """What the folder of --record tells of a run besides its report."""
    strategy = as_strategy(config.strategy or "single")
    known: dict[str, Any] = {"script": command[1:], "slow": config.slow, "kill": config.kill}
    known["servers"] = strategy.servers(workers)
    if strategy.pp is not None:
        term = strategy.pp
        known["pipeline"] = {"schedule": term.schedule, "stages": term.size, "chunks": term.chunks}
    if cluster is not None:
        from shoal.cluster.toml_file import cluster_text  # only where needed
        from shoal.commands.subject import named_cluster

        known["cluster"] = cluster_text(named_cluster(cluster))
        known["prediction"] = _predicted(command, strategy, workers, cluster)
    return known


def _predicted(
    command: Sequence[str], strategy: Strategy, workers: int, cluster: str
) -> dict[str, Any] | None:
    from shoal.commands.subject import named_cluster, workload_of_command  # only where needed
    from shoal.plan.predict import PlanSettings, predict

    try:
        subject = workload_of_command(command)
        hardware = named_cluster(cluster).of_size(workers)
        settings = PlanSettings(subject.batch)
        return predict(subject.workload, hardware, strategy, workers, settings).as_dict()
    except ShoalError as error:
        say(f"the record has no prediction: {error}")
        return None


def with_cluster(config: RunConfig, name: str | None) -> RunConfig:
    """BadInput where there is no such cluster."""
    if name is None:
        return config
    cluster = load_cluster(name)
    return replace(config, hosts_per_rack=cluster.nodes_per_rack)


def train(
    asked: launching.WorkersOptions,
    example: str = argument("digits, gpt or clicks.", "digits"),
    args: list[str] | None = options.SCRIPT_ARGS,
    resume: bool = option("Continue from the checkpoint in --out.", False),
    out: Path | None = option("Where to save.", show_default="runs/EXAMPLE"),
) -> None:
    """Train an example and save it."""
    if example not in launching.EXAMPLES:
        raise BadInput(
            f"there is no example {example!r}: take one of {', '.join(launching.EXAMPLES)}"
        )
    out = out or Path("runs") / example
    extra = [*(args or []), "--out", str(out), *(["--resume"] if resume else [])]
    command = launching.command_for(example, extra)
    asked = asked.resolved(command)
    start_s = time.monotonic()
    config = asked.to_config(resume=resume)
    files = asked.files
    if asked.record is not None:
        files = replace(files, more=recorded(command, asked.workers or 1, config))
    with launching.traced(config, files.traces, asked.timeline) as config:
        launching.run_shown(command, asked.workers or 1, config, files, plain=asked.plain)
    print(f"trained {example} in {time.monotonic() - start_s:.1f} s; saved in {out}")


def evaluate(
    checkpoint: Path = argument("The folder of a checkpoint.", ...),
    script: str | None = argument(
        "The script that saved it, with a function evaluate(job, checkpoint) or "
        "test(job, checkpoint).",
        show_default="the example that saved it",
    ),
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: int | None = options.RUN_WORKERS,
    strategy: options.Strategy = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Test what a script or an example has trained, on data that it has not seen."""
    if not (checkpoint / MANIFEST).exists():
        raise CheckpointError(f"there is no checkpoint at {checkpoint} (no {MANIFEST} in it)")
    name = script or _example_of(checkpoint)
    command = launching.command_for(name, args)
    asked = launching.WorkersOptions(workers, strategy, device=device)
    start_s = time.monotonic()
    target = command[2:] if command[1] == "-m" else command[1:]
    with scratch_folder("eval") as folder:
        result = folder / "result.json"
        words = [*launching.WORKER_COMMAND, "eval", str(checkpoint), str(result), *target]
        is_quiet = as_json or script is None
        launch_workers = launching.run_quietly if is_quiet else launching.run_shown
        launch_workers(words, asked.workers or 1, asked.to_config())
        metrics = json.loads(result.read_text("utf-8")) if result.is_file() else {}
    seconds = time.monotonic() - start_s
    of = "example" if script is None else "script"
    document = {"checkpoint": str(checkpoint), of: name, **metrics, "seconds": seconds}
    shown = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items()) or "no metric"
    show(document, [f"{name}: {shown} (tested in {seconds:.1f} s)"], as_json)


def _example_of(checkpoint: Path) -> str:
    """Which example has saved it."""
    from shoal.train.checkpoints.files import read_manifest  # torch: only where it is needed

    about = read_manifest(checkpoint).get("about")
    name = about.get("example") if isinstance(about, dict) else None
    if name not in launching.EXAMPLES:
        raise CheckpointError(
            f"the checkpoint at {checkpoint} is not of an example, so there is no test for it: "
            "name its script behind it, with a function evaluate(job, checkpoint)"
        )
    return str(name)
