"""`shoal predict`: the parts of a step under one strategy, what bounds each, and the memory."""

from __future__ import annotations

import math
from dataclasses import replace

from rich.table import Table

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.goodput import FailureOptions, goodput_parts
from shoal.commands.launching import strategy_for
from shoal.commands.options import option
from shoal.commands.output import Part, bold, plain_table, show
from shoal.commands.subject import (
    LOST_WORKERS,
    SLOW_WORKERS,
    PredictedStepOptions,
    Subject,
    SubjectOptions,
    slow_workers,
    workers_at,
)
from shoal.errors import BadInput, StrategyError
from shoal.plan.explain import bound_words, does_not_fit, gradient_traffic, smaller_micro_batches
from shoal.plan.predict import PlanSettings, Predictor, folded
from shoal.plan.predict import predict as predict_on
from shoal.plan.prediction import Prediction
from shoal.plan.step.collective_time import MEGATRON_ORDER, SHOAL_ORDER
from shoal.plan.step.slow_workers import without
from shoal.plan.workloads import Workload
from shoal.runtime.wording import counted
from shoal.strategy.strategy import Layout, Strategy, as_strategy

_MOST_WORKERS = 10_000_000
_NO_TIME = Device("any", math.inf, 1e30, {"fp32": 1e30})  # for what is sent alone
_ORDERS = {"shoal": SHOAL_ORDER, "megatron": MEGATRON_ORDER}


def _spread(one: Prediction) -> str:
    """13.3 to 17.8 ms."""
    low = show_seconds(one.low_s)
    high = show_seconds(one.high_s)
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"


def _cells(one: Prediction, first: Prediction) -> list[str]:
    speedup = one.samples_per_s / first.samples_per_s
    share = one.largest.seconds / one.step_s
    return [
        str(one.workers),
        show_seconds(one.step_s),
        _spread(one),
        f"{one.samples_per_s:.3g}",
        f"{speedup:.2f}",
        f"{speedup * first.workers / one.workers:.0%}",
        "" if one.mfu is None else f"{one.mfu:.1%}",
        show_bytes(one.memory.total) + ("" if one.fits else " (too large)"),
        f"{one.largest.name} {share:.0%}, {bound_words(one.largest)}",
    ]


def predict(
    asked: SubjectOptions,
    of_step: PredictedStepOptions,
    failing: FailureOptions,
    numbers: options.WorkerNumbers = "1",
    strategy: options.Strategy = None,
    slow: list[str] | None = SLOW_WORKERS,
    lost: list[str] | None = LOST_WORKERS,
    fold_ep: bool = option(
        "Ranks of tp hold whole experts, and ep counts them, too.", False, "--fold-ep"
    ),
    order: str = option("Of ranks: shoal, or megatron (replicas inside of stages).", "shoal"),
    as_json: options.Json = False,
) -> None:
    """Predict how long a training step takes, and how much memory it needs.

    The step is shown by its parts, each with what bounds it: compute, memory, launches of kernels
    or the link. With several numbers of workers (-n 2,4,8) there is one row for each. Nothing is
    trained. With --network alone, the time is that of gradients on the wire; name the --cluster,
    also this-machine, for what the step computes.
    """
    if order not in _ORDERS:
        raise BadInput(f"--order is {' or '.join(_ORDERS)}, not {order!r}")
    several = options.parse_counts("-n", numbers, _MOST_WORKERS)
    workers = max(several)
    if fold_ep:
        strategy = str(folded(as_strategy(strategy or "ddp")))
    try:
        values = [strategy_for(strategy, number) for number in several]
    except StrategyError as error:
        hint = "; --fold-ep where ep counts the ranks of tp" if "ep(" in (strategy or "") else ""
        raise StrategyError(f"{error}{hint}") from None
    subject = asked.subject(workers)
    settings = replace(of_step.on(asked.settings(subject.batch)), fold_ep=fold_ep)
    hardware, failures = failing.on(asked.hardware(workers), workers)
    link = asked.link()
    workload = subject.workload
    only_wire = link is not None and asked.cluster is None
    if only_wire:
        hardware = Cluster("network", _NO_TIME, Node(1, nic=link), workers)
    of_one = {"--mtbf": failing != FailureOptions(), "--slow": slow, "--lost": lost}
    for name, is_given in of_one.items():
        if is_given and (only_wire or len(several) > 1):
            raise BadInput(f"{name} needs one number of workers, and a --cluster")
    if only_wire or len(several) > 1:
        pairs = list(zip(values, several, strict=True))
        found = [predict_on(workload, hardware, *pair, settings, _ORDERS[order]) for pair in pairs]
        if only_wire:
            said = [gradient_traffic(workload, v.layout(n).replicas, link) for v, n in pairs]
            return _show_wire(found, said, workload.name, as_json)
        return _show_several(found, subject, asked.notes(subject, workers), as_json)
    (value,) = values
    slower = tuple(sorted(slow_workers(slow or (), hardware, workers).items()))
    layout = value.layout(workers)
    if lost:
        gone = {one for text in lost for one in workers_at(text, "--lost", hardware, workers)}
        layout, slower = without(gone, layout, slower, _ORDERS[order])
    settings = replace(settings, failures=failures, slow=slower)
    predictor = Predictor(workload, hardware, _ORDERS[order])
    prediction = _advised(predictor, value, layout, settings)
    notes = (*prediction.notes, *asked.notes(subject, workers))
    prediction = replace(prediction, notes=notes)
    link = link or (hardware.node.nic if hardware.nodes > 1 else hardware.node.fabric)
    traffic = gradient_traffic(workload, layout.replicas, link)
    document = {"model": workload.name, "traffic": traffic, **prediction.as_dict()}
    parts = _parts(prediction, workload, traffic, settings)
    if prediction.goodput is not None:
        parts += goodput_parts(prediction.goodput, hardware)
    show(document, parts, as_json, wraps=True)


def _advised(
    predictor: Predictor, value: Strategy, layout: Layout, settings: PlanSettings
) -> Prediction:
    prediction = predictor.predict(value, layout.workers, settings, layout)
    advice = smaller_micro_batches(predictor, value, prediction, settings)
    return replace(prediction, notes=(*prediction.notes, advice)) if advice else prediction


def _show_wire(found: list[Prediction], said: list[str], name: str, as_json: bool) -> None:
    """What is sent, and how long that takes: the devices are not those that were asked for."""
    parts: list[Part] = []
    documents = []
    for one, traffic in zip(found, said, strict=True):
        on = f"{name} under {one.strategy} on {counted(one.workers, 'worker')}"
        sent = [part for part in one.parts if part.seconds > 1e-12]
        rows = [[part.name, show_seconds(part.seconds), bound_words(part)] for part in sent]
        table = plain_table("", ["part", "time", "bound by"], rows, left=3)
        parts += [bold(f"{on}: {show_seconds(one.step_s)} a step on the wire"), traffic, table]
        documents.append({"model": name, "traffic": traffic, "wire_s": one.step_s})
    parts.append("computing is not counted: name its devices, --cluster this-machine or a preset")
    several = {"model": name, "predictions": documents}
    show(documents[0] if len(found) == 1 else several, parts, as_json, wraps=True)


def _show_several(
    found: list[Prediction], subject: Subject, notes: tuple[str, ...], as_json: bool
) -> None:
    """One row a number of workers; the speed-up is over the first of them."""
    name = subject.workload.name
    strategies = ", ".join(dict.fromkeys(one.strategy for one in found))
    heading = f"{name} under {strategies} on {found[0].cluster}, batch {subject.batch}"
    heads = ["workers", "step", "range", "samples/s", "speed-\nup", "effi-\nciency", "MFU"]
    heads += ["memory", "most of it"]
    table = plain_table("", heads, [_cells(one, found[0]) for one in found])
    table.columns[-1].justify = "left"
    document = {"model": name, "predictions": [one.as_dict() for one in found], "notes": notes}
    show(document, [bold(heading), table, *notes], as_json, wraps=True)


def _parts(
    prediction: Prediction, workload: Workload, traffic: str, settings: PlanSettings
) -> list[Part]:
    spread = _spread(prediction)
    hardware = f"{counted(prediction.workers, 'worker')} of {prediction.cluster}"
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    heading = (
        f"{workload.name} under {prediction.strategy} on {hardware}, "
        f"batch {prediction.batch}: {show_seconds(prediction.step_s)} a step "
        f"({spread}), {prediction.samples_per_s:.3g} samples/s{utilization}"
    )
    no_room = "" if prediction.fits else does_not_fit(prediction, settings)
    lines = [no_room, prediction.convergence, *prediction.notes]
    tables = [_parts_table(prediction), _memory_table(prediction)]
    return [bold(heading), traffic, *tables, *(line for line in lines if line)]


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
    sizes.append(prediction.memory_limit_bytes)
    heads = [*shown, "sum", "of"]
    if memory.host:
        heads += ["host"] if prediction.host_limit_bytes is None else ["host", "of"]
        sizes += [memory.host, prediction.host_limit_bytes or 0.0][: len(heads) - len(sizes)]
    row = [show_bytes(size) for size in sizes]
    return plain_table("\nmemory of the fullest device", heads, [row])
