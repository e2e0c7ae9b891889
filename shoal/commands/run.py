"""`shoal run`: a script on many workers."""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster.presets import load_cluster
from shoal.commands import options
from shoal.commands.launching import (
    WorkersOptions,
    check_engine,
    command_for,
    run_shown,
    traced,
)
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig


@options.with_fields
def run(
    script: options.Script,
    asked: WorkersOptions,
    args: options.ScriptArgs = None,
    on: options.On = None,
    logs: options.Logs = None,
    checkpoint: options.Checkpoint = None,
    resume: options.Resume = False,
    cluster: options.RunCluster = None,
) -> None:
    """Run a training script on several workers of this host, or of an engine's (--on)."""
    if on is not None:
        check_engine(on)
    command = command_for(script, args)
    asked = asked.resolved(command)
    options_config = with_cluster(asked.to_config(on, checkpoint, resume), cluster, on)
    if resume and options_config.server_checkpoint.folder is None:
        raise BadInput("--resume goes on from --server-checkpoint DIR: give that, too")
    with traced(options_config, asked.trace) as config:
        run_shown(command, asked.workers or 1, config, asked.report, on, logs)


def with_cluster(config: RunConfig, name: str | None, on: str | None = None) -> RunConfig:
    """BadInput where there is no such cluster."""
    if name is None:
        return config
    cluster = load_cluster(name)
    config = replace(config, hosts_per_rack=cluster.nodes_per_rack)
    if on is None:
        return config
    from shoal.commands.cluster_calibrate import with_measured_transport  # only where needed

    return with_measured_transport(config, cluster, on)
