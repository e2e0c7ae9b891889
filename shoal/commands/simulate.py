"""`shoal simulate`: the steps of a strategy event by event on a cluster, with a trace."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster import Noise
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.commands import options
from shoal.commands.launching import check_folder, strategy_for
from shoal.commands.options import option
from shoal.commands.output import bold, shares_of_time, show
from shoal.commands.subject import (
    SLOW_WORKERS,
    PredictedStepOptions,
    SubjectOptions,
    slow_workers,
    workers_at,
)
from shoal.observe.time_shares import all_shares, write_chrome
from shoal.plan.predict import Predictor
from shoal.plan.simulator.step_tasks import Unevenness
from shoal.plan.simulator.strategies import SimulatedStep, simulate_strategy
from shoal.runtime.wording import counted

_MOST_SHOWN = 16  # ranks whose time is divided in a table


def simulate(
    asked: SubjectOptions,
    of_step: PredictedStepOptions,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
    slow: list[str] | None = SLOW_WORKERS,
    lost: list[str] | None = option(
        "Leave a worker out: 12, or all of node:2 or rack:3, with what is left of their "
        "replicas; the others do the whole batch. Repeatable."
    ),
    noise_seed: int | None = option(
        "Workers are as unequal as the cluster's noise says, by this seed.", None, "--noise-seed"
    ),
    steps: int | None = option(
        "Steps to simulate.", min=1, show_default="as many as the strategy needs"
    ),
    trace: Path | None = options.TRACE,
    as_json: options.Json = False,
) -> None:
    """Simulate training steps on a cluster: computation, messages that share links, waits.

    Beside the closed form of `shoal predict`. `--trace` writes the Chrome trace of a run.
    """
    check_folder(trace, "a trace")
    value = strategy_for(strategy, workers)
    subject = asked.subject(workers)
    settings = of_step.on(asked.settings(subject.batch))
    hardware = asked.hardware(workers)
    workload = subject.workload
    noise = Noise() if noise_seed is None else hardware.noise
    slower = slow_workers(slow or (), hardware, workers)
    uneven = Unevenness(noise, noise_seed or 0, slower)
    missing = {one for text in lost or () for one in workers_at(text, "--lost", hardware, workers)}
    found = simulate_strategy(workload, hardware, value, workers, settings, uneven, steps, missing)
    left = sum(found.run.like.values())
    closed = Predictor(workload, hardware).predict(value, left, settings)
    how = "at the most that links, servers and workers do" if found.run.is_bound else "simulated"
    heading = (
        f"{workload.name} under {value} on {counted(left, 'worker')} of {hardware.name}, batch "
        f"{subject.batch}: {show_seconds(found.step_s)} a step {how}, "
        f"{show_seconds(closed.step_s)} by the closed form"
    )
    document = {
        "strategy": str(value),
        "workers": left,
        "step_s": found.step_s,
        "closed_form_s": closed.step_s,
        "steps": found.run.steps,
        "simulated_s": found.run.seconds,
        "left_out_microbatches": found.left_out,
        "rank_end_s": found.run.rank_end_s[-1],
        "ranks": found.run.like,
        "flows": found.run.flows,
        "events": found.run.events,
        "busiest_link": found.busiest_link._asdict() if found.busiest_link else None,
    }
    show(document, [bold(heading), _busiest(found)], as_json, wraps=True)
    _show_spans(found, trace, as_json)


def _show_spans(found: SimulatedStep, trace: Path | None, as_json: bool) -> None:
    spans = found.run.spans_by_rank
    written = None if trace is None else write_chrome(spans, trace)
    if as_json:
        return
    shown = {rank: spans[rank] for rank in list(spans)[:_MOST_SHOWN]}
    show(None, shares_of_time(all_shares(shown)), as_json)
    like = found.run.like
    if len(spans) > _MOST_SHOWN:
        print(f"and {len(spans) - _MOST_SHOWN} more ranks")
    if len(like) < sum(like.values()):
        each = ", ".join(f"{rank} for {like[rank]}" for rank in list(like)[:_MOST_SHOWN])
        print(
            f"ranks that are alike are simulated once: {each}; "
            f"{counted(found.run.flows, 'class', 'classes')} of messages"
        )
    if found.left_out:
        print(f"{found.left_out} micro-batches of the steady state are added, not simulated")
    if written is not None:
        print(written)


def _busiest(found: SimulatedStep) -> str:
    if found.busiest_link is None:
        return "no message leaves a device"
    name, rate, num_bytes = found.busiest_link
    busy = num_bytes / rate / found.run.seconds
    return (
        f"busiest link: {name}, {show_rate(rate)}, carries {show_bytes(num_bytes)} "
        f"and is full {busy:.1%} of the time"
    )
