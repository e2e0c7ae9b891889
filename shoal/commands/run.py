"""`shoal run`: a script on many workers."""

from __future__ import annotations

from shoal.commands.target import (
    Device,
    Gpus,
    Kill,
    Report,
    Script,
    ScriptArgs,
    Seed,
    Slow,
    StrategyText,
    Trace,
    Workers,
    add_faults,
    command_for,
    environment,
    run_shown,
    strategy_for,
    traced,
)


def run(
    script: Script,
    args: ScriptArgs = None,
    workers: Workers = 1,
    strategy: StrategyText = None,
    seed: Seed = None,
    device: Device = None,
    gpus: Gpus = None,
    trace: Trace = None,
    slow: Slow = None,
    kill: Kill = None,
    report: Report = None,
) -> None:
    """Run a training script on several workers of this host."""
    command = command_for(script, args)
    env = environment(strategy_for(strategy, workers), seed, device, gpus)
    add_faults(env, slow, kill, workers)
    with traced(env, trace):
        run_shown(command, workers, env, report)
