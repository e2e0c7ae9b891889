"""`shoal simulate`: the steps of a strategy event by event on a cluster, with a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cluster import Noise
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.commands import options
from shoal.commands.launching import check_folder, strategy_for
from shoal.commands.output import bold, shares_of_time, show
from shoal.commands.subject import PredictedStepOptions, SubjectOptions
from shoal.observe.time_shares import all_shares, write_chrome
from shoal.plan.predict import Predictor
from shoal.plan.simulator.step_tasks import Unevenness
from shoal.plan.simulator.strategies import SimulatedStep, simulate_strategy
from shoal.runtime.faults import read_slow
from shoal.runtime.wording import counted

_MOST_SHOWN = 16  # ranks whose time is divided in a table


@options.with_fields
def simulate(
    asked: SubjectOptions,
    of_step: PredictedStepOptions,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
    slow: options.Slow = None,
    noise_seed: Annotated[
        int | None,
        typer.Option(
            "--noise-seed", help="Workers are as unequal as the cluster's noise says, by this seed."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps to simulate.", show_default="as many as the strategy needs"
        ),
    ] = None,
    trace: options.Trace = None,
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
    closed = Predictor(workload, hardware).predict(value, workers, settings)
    noise = Noise() if noise_seed is None else hardware.noise
    uneven = Unevenness(noise, noise_seed or 0, read_slow(slow or (), workers))
    found = simulate_strategy(workload, hardware, value, workers, settings, uneven, steps)
    heading = (
        f"{workload.name} under {value} on {counted(workers, 'worker')} of {hardware.name}, batch "
        f"{subject.batch}: {show_seconds(found.step_s)} a step simulated, "
        f"{show_seconds(closed.step_s)} by the closed form"
    )
    document = {
        "strategy": str(value),
        "workers": workers,
        "step_s": found.step_s,
        "closed_form_s": closed.step_s,
        "steps": found.run.steps,
        "simulated_s": found.run.seconds,
        "left_out_microbatches": found.left_out,
        "rank_end_s": found.run.rank_end_s[-1],
        "busiest_link": found.busiest_link._asdict() if found.busiest_link else None,
    }
    show(document, [bold(heading), _busiest(found)], as_json, wraps=True)
    _show_spans(found, trace, as_json)


def _show_spans(found: SimulatedStep, trace: Path | None, as_json: bool) -> None:
    spans = found.run.spans_by_rank
    written = None if trace is None else write_chrome(spans, trace)
    if as_json:
        return
    show(None, shares_of_time(dict(list(all_shares(spans).items())[:_MOST_SHOWN])), as_json)
    if len(spans) > _MOST_SHOWN:
        print(f"and {len(spans) - _MOST_SHOWN} more ranks")
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
