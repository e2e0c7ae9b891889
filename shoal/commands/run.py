"""`shoal run`: a script on many workers."""

from __future__ import annotations

from shoal.commands import options
from shoal.commands.launching import (
    add_faults,
    command_for,
    environment,
    run_shown,
    strategy_for,
    traced,
)


def run(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
    seed: options.Seed = None,
    device: options.Device = None,
    gpus: options.Gpus = None,
    trace: options.Trace = None,
    slow: options.Slow = None,
    kill: options.Kill = None,
    report: options.Report = None,
) -> None:
    """Run a training script on several workers of this host."""
    command = command_for(script, args)
    env = environment(strategy_for(strategy, workers), seed, device, gpus)
    add_faults(env, slow, kill, workers)
    with traced(env, trace):
        run_shown(command, workers, env, report)
