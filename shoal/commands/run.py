"""`shoal run`: a script on many workers."""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster.presets import load_cluster
from shoal.commands import options
from shoal.commands.calibrate_between import with_measured_transport
from shoal.commands.engines import check_engine
from shoal.commands.launching import (
    WorkersOptions,
    command_for,
    elastic_options,
    resolve_auto,
    run_shown,
    traced,
)
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig


def run(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.RunWorkers = None,
    on: options.On = None,
    strategy: options.Strategy = None,
    seed: options.Seed = None,
    device: options.Device = None,
    gpus: options.Gpus = None,
    trace: options.Trace = None,
    slow: options.Slow = None,
    kill: options.Kill = None,
    timeout: options.Timeout = None,
    grace: options.Grace = None,
    report: options.Report = None,
    logs: options.Logs = None,
    restart: options.Restart = None,
    start: options.Start = None,
    checkpoint: options.Checkpoint = None,
    elastic: options.Elastic = None,
    server_checkpoint: options.ServerCheckpoint = None,
    resume: options.Resume = False,
    cluster: options.RunCluster = None,
) -> None:
    """Run a training script on several workers of this host, or of an engine's (--on)."""
    if on is not None:
        check_engine(on)
    command = command_for(script, args)
    strategy = resolve_auto(strategy, command, workers or 1, device)
    asked = WorkersOptions(
        *(workers or 1, strategy, seed, device, gpus, slow, kill, timeout, grace, restart, start),
        server_checkpoint=server_checkpoint,
        resume=resume,
        on=on,
        checkpoint=checkpoint,
    )
    asked = elastic_options(asked, elastic, workers)
    options_config = with_cluster(asked.to_config(), cluster, on)
    if resume and options_config.server_checkpoint.folder is None:
        raise BadInput("--resume goes on from --server-checkpoint DIR: give that, too")
    with traced(options_config, trace) as config:
        run_shown(command, asked.workers, config, report, on, logs)


def with_cluster(config: RunConfig, name: str | None, on: str | None = None) -> RunConfig:
    """BadInput where there is no such cluster."""
    if name is None:
        return config
    cluster = load_cluster(name)
    config = replace(config, hosts_per_rack=cluster.nodes_per_rack)
    return config if on is None else with_measured_transport(config, cluster, on)
