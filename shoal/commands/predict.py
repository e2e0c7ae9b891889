"""`shoal predict`: the parts of a step under one strategy, what bounds each, and the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from shoal.cluster.cluster import Cluster
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.launching import check_folder, strategy_for
from shoal.commands.output import plain_table, wide_console
from shoal.commands.subject import (
    Batch,
    ClusterName,
    FlashAttention,
    Gpt,
    Limit,
    Model,
    Network,
    Precision,
    cluster_of,
    subject_of,
)
from shoal.commands.worker_numbers import WorkerNumbers, scaling_table, worker_numbers
from shoal.errors import BadInput
from shoal.plan.explain import bound_words, does_not_fit, gradient_traffic, smaller_micro_batches
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.predict import predict as predict_on
from shoal.plan.prediction import Prediction
from shoal.plan.simulator.strategies import SimulatedStep, simulate_strategy
from shoal.plan.workloads.workload import Recompute, Workload
from shoal.runtime.wording import counted
from shoal.strategy.strategy import Strategy

RECOMPUTES = ("none", "selective", "full")
MicroBatch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples of a micro-batch of one replica.",
        show_default="as the script accumulates; under pp two micro-batches for each stage",
    ),
]
RecomputeOption = Annotated[
    str, typer.Option("--recompute", help="Of activations: none, selective or full.")
]

Simulate = Annotated[
    bool, typer.Option("--simulate", help="Also simulate the step, message by message.")
]
Timeline = Annotated[
    Path | None,
    typer.Option("--trace", help="Simulate, and write the timeline as a Chrome trace here."),
]


def predict(
    model: Model = None,
    args: options.ScriptArgs = None,
    numbers: WorkerNumbers = "1",
    strategy: options.Strategy = None,
    cluster: ClusterName = "this-machine",
    gpt: Gpt = None,
    network: Network = None,
    batch: Batch = None,
    microbatch: MicroBatch = None,
    recompute: RecomputeOption = "none",
    precision: Precision = None,
    flash_attention: FlashAttention = False,
    limit: Limit = None,
    simulate: Simulate = False,
    trace: Timeline = None,
    as_json: options.Json = False,
) -> None:
    """Predict how long a training step takes, and how much memory it needs.

    The step is shown by its parts, each with what bounds it: compute, memory, launches of kernels
    or the link. With several numbers of workers (-n 2,4,8) there is one row for each. Nothing is
    trained.
    """
    if trace is not None:
        check_folder(trace, "a trace")
    several = worker_numbers(numbers)
    workers = max(several)
    asked = [(strategy_for(strategy, number), number) for number in several]
    value = asked[-1][0]
    subject = subject_of(model, args, gpt, precision, batch, workers)
    settings = PlanSettings(subject.batch, microbatch, as_recompute(recompute), flash_attention)
    hardware = cluster_of(cluster, network, limit, workers)
    if len(several) > 1:
        if simulate or trace is not None:
            raise BadInput("--simulate and --trace need one number of workers, not several")
        _predict_several(subject.workload, hardware, asked, settings, as_json)
        return
    predictor = Predictor(subject.workload, hardware)
    prediction = predictor.predict(value, workers, settings)
    advice = smaller_micro_batches(predictor, value, prediction, settings)
    prediction = replace(prediction, notes=(*prediction.notes, advice) if advice else ())
    traffic = gradient_traffic(subject.workload, value.layout(workers).replicas)
    document = {"model": subject.workload.name, "traffic": traffic, **prediction.as_dict()}
    if not as_json:
        _print(prediction, subject.workload, traffic)
    if simulate or trace is not None:
        simulated = simulate_strategy(subject.workload, hardware, value, workers, settings)
        document["simulated_s"] = simulated.step_s
        if not as_json:
            _print_simulated(prediction, simulated)
        if trace is not None:
            _write_timeline(simulated, trace, as_json)
    if as_json:
        print(json.dumps(document))


def _predict_several(
    workload: Workload,
    cluster: Cluster,
    asked: list[tuple[Strategy, int]],
    settings: PlanSettings,
    as_json: bool,
) -> None:
    found = [predict_on(workload, cluster, strategy, n, settings) for strategy, n in asked]
    if as_json:
        rows = [one.as_dict() for one in found]
        print(json.dumps({"model": workload.name, "predictions": rows}))
        return
    console = wide_console()
    names = ", ".join(dict.fromkeys(one.strategy for one in found))
    heading = f"{workload.name} under {names} on {cluster.name}, batch {settings.batch}"
    console.print(heading, style="bold")
    console.print(scaling_table(found))


def _print_simulated(prediction: Prediction, simulated: SimulatedStep) -> None:
    more = simulated.step_s / prediction.step_s - 1
    print(
        f"simulated with links that flows share: {show_seconds(simulated.step_s)} a step, "
        f"{abs(more):.1%} {'more' if more >= 0 else 'less'} than the closed form"
    )


def _write_timeline(simulated: SimulatedStep, file: Path, quiet: bool) -> None:
    from shoal.observe.time_shares import write_chrome  # only where it is needed

    try:
        write_chrome(simulated.run.spans_by_rank, file)
    except OSError as error:
        raise BadInput(f"cannot write a trace to {file}: {error.strerror}") from error
    if not quiet:
        print(f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)")


def as_recompute(text: str) -> Recompute:
    if text not in RECOMPUTES:
        raise BadInput(f"--recompute is none, selective or full, not {text!r}")
    return cast(Recompute, text)


def _print(prediction: Prediction, workload: Workload, traffic: str) -> None:
    console = wide_console()
    console.print(_heading(prediction, workload), style="bold")
    console.print(_parts_table(prediction))
    console.print(_memory_table(prediction))
    if not prediction.fits:
        console.print(does_not_fit(prediction))
    console.print(traffic)
    for line in (prediction.convergence, *prediction.notes):
        if line:
            console.print(line)


def _heading(prediction: Prediction, workload: Workload) -> str:
    spread = f"{show_seconds(prediction.low_s)} to {show_seconds(prediction.high_s)}"
    hardware = f"{counted(prediction.workers, 'worker')} of {prediction.cluster}"
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    return (
        f"{workload.name} under {prediction.strategy} on {hardware}, "
        f"batch {prediction.batch}: {show_seconds(prediction.step_s)} a step "
        f"({spread}), {prediction.samples_per_s:.3g} samples/s{utilization}"
    )


def _parts_table(prediction: Prediction) -> Table:
    table = plain_table("", ["part", "time", "share", "bound by"], left=1)
    table.columns[3].justify = "left"
    for part in prediction.parts:
        share = part.seconds / prediction.step_s
        table.add_row(part.name, show_seconds(part.seconds), f"{share:.1%}", bound_words(part))
    return table


def _memory_table(prediction: Prediction) -> Table:
    memory = prediction.memory
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "servers")
    shown = [kind for kind in kinds if getattr(memory, kind) or kind in kinds[:4]]
    table = plain_table("\nmemory of the fullest device", [*shown, "sum", "of"])
    cells = [show_bytes(getattr(memory, kind)) for kind in shown]
    limit = show_bytes(prediction.memory_limit_bytes)
    table.add_row(*cells, show_bytes(memory.total), limit)
    return table
