"""`shoal predict`: the parts of a step under one strategy, what bounds each, and the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.launching import check_folder, strategy_for
from shoal.commands.output import Part, bold, plain_table, show
from shoal.commands.subject import RecomputeOption, Subject, SubjectOptions
from shoal.errors import BadInput
from shoal.plan.explain import bound_words, does_not_fit, gradient_traffic, smaller_micro_batches
from shoal.plan.predict import Predictor
from shoal.plan.predict import predict as predict_on
from shoal.plan.prediction import Prediction
from shoal.plan.simulator.strategies import SimulatedStep, simulate_strategy
from shoal.plan.workloads import Workload
from shoal.runtime.wording import counted

_MOST_WORKERS = 10_000_000


def worker_numbers(text: str) -> list[int]:
    """The numbers of a list such as 2,4,8."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and word.isascii() for word in words):
        raise BadInput(f"-n takes a number of workers, or several such as 2,4,8, not {text!r}")
    numbers = [int(word) if len(word) < 12 else _MOST_WORKERS + 1 for word in words]
    for number in numbers:
        if not 1 <= number <= _MOST_WORKERS:
            raise BadInput(f"-n {text}: a number of workers is from 1 to {_MOST_WORKERS:,}")
    return list(dict.fromkeys(numbers))


def _cells(one: Prediction, first: Prediction) -> list[str]:
    speedup = one.samples_per_s / first.samples_per_s
    share = one.largest.seconds / one.step_s
    return [
        str(one.workers),
        show_seconds(one.step_s),
        f"{one.samples_per_s:.3g}",
        f"{speedup:.2f}",
        f"{speedup * first.workers / one.workers:.0%}",
        "" if one.mfu is None else f"{one.mfu:.1%}",
        show_bytes(one.memory.total) + ("" if one.fits else " (too large)"),
        f"{one.largest.name} {share:.0%}, {bound_words(one.largest)}",
    ]


@options.with_fields
def predict(
    asked: SubjectOptions,
    numbers: Annotated[
        str,
        typer.Option(
            "--workers", "-n", metavar="INTEGERS", help="Number of workers, or several: 2,4,8."
        ),
    ] = "1",
    strategy: options.Strategy = None,
    recompute: RecomputeOption = "none",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also simulate the step, message by message.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Simulate, and write the timeline as a Chrome trace here."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Predict how long a training step takes, and how much memory it needs.

    The step is shown by its parts, each with what bounds it: compute, memory, launches of kernels
    or the link. With several numbers of workers (-n 2,4,8) there is one row for each. Nothing is
    trained.
    """
    check_folder(trace, "a trace")
    several = worker_numbers(numbers)
    workers = max(several)
    values = [strategy_for(strategy, number) for number in several]
    subject = asked.subject(workers)
    settings = asked.settings(subject.batch, recompute)
    hardware = asked.hardware(workers)
    predictor = Predictor(subject.workload, hardware)
    if len(several) > 1:
        if simulate or trace is not None:
            raise BadInput("--simulate and --trace need one number of workers, not several")
        pairs = zip(values, several, strict=True)
        found = [predict_on(subject.workload, hardware, *pair, settings) for pair in pairs]
        _show_several(found, subject, as_json)
        return
    (value,) = values
    prediction = predictor.predict(value, workers, settings)
    advice = smaller_micro_batches(predictor, value, prediction, settings)
    if advice:
        prediction = replace(prediction, notes=(*prediction.notes, advice))
    traffic = gradient_traffic(subject.workload, value.layout(workers).replicas)
    document = {"model": subject.workload.name, "traffic": traffic, **prediction.as_dict()}
    parts = _parts(prediction, subject.workload, traffic)
    if simulate or trace is not None:
        simulated = simulate_strategy(subject.workload, hardware, value, workers, settings)
        document["simulated_s"] = simulated.step_s
        parts += _simulated_parts(simulated, prediction, trace)
    show(document, parts, as_json)


def _simulated_parts(
    simulated: SimulatedStep, prediction: Prediction, trace: Path | None
) -> Iterator[str]:
    more = simulated.step_s / prediction.step_s - 1
    yield (
        f"simulated with links that flows share: {show_seconds(simulated.step_s)} a step, "
        f"{abs(more):.1%} {'more' if more >= 0 else 'less'} than the closed form"
    )
    if trace is not None:
        from shoal.observe.time_shares import write_chrome  # only where it is needed

        write_chrome(simulated.run.spans_by_rank, trace)
        yield f"trace: {trace} (open it in chrome://tracing or ui.perfetto.dev)"


def _show_several(found: list[Prediction], subject: Subject, as_json: bool) -> None:
    """One row a number of workers; the speed-up is over the first of them."""
    name = subject.workload.name
    strategies = ", ".join(dict.fromkeys(one.strategy for one in found))
    heading = f"{name} under {strategies} on {found[0].cluster}, batch {subject.batch}"
    heads = ["workers", "step", "samples/s", "speed-up", "efficiency", "MFU", "memory"]
    table = plain_table("", [*heads, "most of it"], [_cells(one, found[0]) for one in found])
    table.columns[-1].justify = "left"
    document = {"model": name, "predictions": [one.as_dict() for one in found]}
    show(document, [bold(heading), table], as_json)


def _parts(prediction: Prediction, workload: Workload, traffic: str) -> list[Part]:
    spread = f"{show_seconds(prediction.low_s)} to {show_seconds(prediction.high_s)}"
    hardware = f"{counted(prediction.workers, 'worker')} of {prediction.cluster}"
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    heading = (
        f"{workload.name} under {prediction.strategy} on {hardware}, "
        f"batch {prediction.batch}: {show_seconds(prediction.step_s)} a step "
        f"({spread}), {prediction.samples_per_s:.3g} samples/s{utilization}"
    )
    no_room = "" if prediction.fits else does_not_fit(prediction)
    lines = [no_room, traffic, prediction.convergence, *prediction.notes]
    tables = [_parts_table(prediction), _memory_table(prediction)]
    return [bold(heading), *tables, *(line for line in lines if line)]


def _parts_table(prediction: Prediction) -> Table:
    total_s = prediction.step_s
    rows = [
        [part.name, show_seconds(part.seconds), f"{part.seconds / total_s:.1%}", bound_words(part)]
        for part in prediction.parts
    ]
    table = plain_table("", ["part", "time", "share", "bound by"], rows, left=1)
    table.columns[3].justify = "left"
    return table


def _memory_table(prediction: Prediction) -> Table:
    memory = prediction.memory
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "servers")
    shown = [kind for kind in kinds if getattr(memory, kind) or kind in kinds[:4]]
    sizes = [*(getattr(memory, kind) for kind in shown), memory.total]
    row = [show_bytes(size) for size in (*sizes, prediction.memory_limit_bytes)]
    return plain_table("\nmemory of the fullest device", [*shown, "sum", "of"], [row])
