"""`shoal explain`: who holds what under a strategy, who sends what to whom, and the five steps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from shoal.cluster.presets import load_cluster
from shoal.cluster.units import show_bytes
from shoal.commands import options
from shoal.commands.launching import command_for, strategy_for
from shoal.commands.memory import estimates
from shoal.commands.options import argument, option
from shoal.commands.output import Part, plain_table, show, write_text
from shoal.commands.subject import Subject
from shoal.errors import BadInput, ShoalError
from shoal.plan.predict import PlanSettings, Predictor, resolve_step
from shoal.plan.step.collective_time import Network, group_of
from shoal.plan.sync_price import SyncQuestion
from shoal.plan.workloads import Precision
from shoal.runtime import svg as drawing
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.schedules.steps.catalog import step_of
from shoal.schedules.steps.step import Exchange, What, When, Where
from shoal.schedules.steps.tensor_layout import EvenLayout
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.strategy import AXES, Layout, Strategy, as_strategy
from shoal.worker.auto import read_trace

STEPS = ("forward", "backward", "push, reduce", "update", "pull")
Lanes = Mapping[str, Sequence[str]]
_ALL = (
    *("single", "ddp", "zero(1)", "zero(2)", "zero(3)", "ps", 'ps(mode="async")', "mapreduce"),
    *("gossip", "localsgd", "hogwild", "tp(2)", "pp(2)", "ep(2)", "cp(2)", "ddp + pp(2)"),
)
_MOST_WORKERS = 12  # rows that are shown
_CLASSES = {  # of table 11.2.1
    "SPSD": "single program, single data: one device",
    "SPMD": "single program, multiple data: data parallelism",
    "MPSD": "multiple programs, single data: model parallelism",
    "MPMD": "multiple programs, multiple data: hybrid parallelism",
}


_VERBS = {"all_reduce": "all-reduce", "all_to_all": "to owners", "reduce": "to owners"}
_REPLICAS = 4  # whose steps show what each does
_SMALL = 0.01  # of what is sent of a kind: headers
_NUMBERS = 1e6  # of the model whose steps are looked at where no script is named


def _some_model() -> WorkerModel:
    layout = EvenLayout(_NUMBERS, layer=_NUMBERS / 8, pair=_NUMBERS / 4)
    return WorkerModel(layout, state=[0.0], on_one_host=False)


def five_steps(term: SyncTerm) -> list[list[str]]:
    """What a worker does in each step of SGD, and a server where there is one."""
    replicas = 1 if term.name == "single" else _REPLICAS
    step, *others = (step_of(term, _some_model(), replicas, rank) for rank in range(replicas))
    passes = ["forward", "backward"]
    reduces, pulls = ["-"], ["-"]
    for one in sorted(step.exchanges, key=lambda one: -one.num_bytes):
        if one.when is When.BEFORE_UNIT:
            passes = ["gather, forward", "gather, backward"]
        elif one.kind == "pull" or one.what is What.PARAMETERS:
            pulls.insert(-1, _verb(one, term))
        else:
            reduces.insert(-1, _verb(one, term))
    update = "own copy" if step.exchanges else "weights"
    if step.updates is Where.SERVER:
        update = "-"
    elif others and step.updated > others[0].updated == 0:
        update = "at worker 0"
        reduces[0] = f"{reduces[0]} at 0".replace("to owners at", "reduce to")
    elif step.updated < _NUMBERS:
        update = "own shard"
    if pulls[0] == "share":
        update = "shared copy"
        pulls[0] = "-"
    lanes = [[*passes, reduces[0], update, pulls[0]]]
    if term.has_servers:
        adds = "add up" if term.adds_up else "each push alone"
        lanes.append(["-", "-", adds, "weights" if update == "-" else "-", "send"])
    return lanes


def _verb(exchange: Exchange, term: SyncTerm) -> str:
    words = _VERBS.get(exchange.kind, exchange.kind)
    if exchange.kind == "all_reduce" and exchange.what is What.PARAMETERS:
        words = "mean"
    if term.meets_every or exchange.every > 1:
        words += f", {_meetings(term)} of {exchange.every}"
    return words + (f", sent {counted(exchange.delay, 'step')} before" if exchange.delay else "")


def _meetings(term: SyncTerm) -> int:
    """In how many steps of a round workers exchange something: one for each fragment."""
    return getattr(term, "fragments", 1)


def _with_other_data(layout: Layout) -> int:
    return layout.replicas * layout.ep * layout.cp


def class_of(layout: Layout) -> str:
    """Whether workers run several programs (parts of the model), and on several data."""
    several = layout.tp * layout.pp * layout.ep > 1, _with_other_data(layout) > 1
    return "{}P{}D".format(*("SM"[is_so] for is_so in several))


class ExplainedExchange(NamedTuple):
    """What ranks send to each other in a step; `sent_bytes` of a worker, None: not known."""

    what: str
    kind: str
    over: list[list[int]]
    sent_bytes: float | None


def explain(
    strategy: str | None = argument('Such as "ddp + pp(2)".', show_default="all, in a table"),
    script: str = argument("A script, or an example.", "digits"),
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: options.Workers = 4,
    svg: Path | None = option("Draw it here."),
    as_json: options.Json = False,
) -> None:
    """Show who holds which layers, state and data, and which collectives run over which ranks.

    The model is split as a run splits it, on tensors without memory. Without a strategy: which
    of them are single or multiple programs on single or multiple data, and their five steps.
    """
    if strategy is None:
        if svg is not None:
            raise BadInput('--svg draws one strategy: shoal explain "ddp + pp(2)" --svg FILE')
        _show_all(as_json)
        return
    value = strategy_for(strategy, workers, to_run=False)
    layout = value.layout(workers)
    with scratch_folder("memory") as folder:
        [found] = estimates(command_for(script, args), [value], workers, folder, traces=True)
        sent = _sent(value, workers, folder, found["held"])
    held = list(_held(value, layout, found))
    lanes = _lanes(value, layout, len(found["servers"]))
    programs = f"{class_of(layout)}: {_CLASSES[class_of(layout)]}"
    servers = "; servers run a program of their own" if found["servers"] else ""
    title = f"{value} on {counted(workers, 'worker')}: {script}"
    document = {
        "strategy": str(value),
        "script": script,
        "class": programs,
        "workers": held,
        "servers": found["servers"],
        "experts": found["experts"],
        "exchanges": [one._asdict() for one in sent],
        "five_steps": {lane: dict(zip(STEPS, cells, strict=True)) for lane, cells in lanes.items()},
    }
    if svg is not None:
        write_text(svg, picture(title, held, lanes, sent))
    rows = [_sent_row(one) for one in sent] or [["nothing", "-", "-", "-"]]
    steps = [[lane, *cells] for lane, cells in lanes.items()]
    parts: list[Part] = [
        f"{programs}{servers}\n",
        _table_of_held(title, held, found["servers"]),
        _tp_words(found["roles"]),
        *([f"{found['experts']}\n"] if found["experts"] else []),
        plain_table("what is sent in a step", ["what", "how", "over ranks", "sent"], rows, left=3),
        "",
        plain_table("the five steps of distributed SGD", ["", *STEPS], steps, left=6),
        f"\n{value.sync_for(layout.replicas).who_waits}{_NOTE}",
    ]
    show(document, parts, as_json, wraps=True)


_NOTE = (
    "forward and backward are bound by compute, the update by memory, the others by links. Sent: "
    "by one worker in a step, the fullest one, as plans count it. Workers and ranks count from 0: "
    "device 1 of a textbook is worker 0. Experts (ep) are named as those of the first worker."
)


def _tp_words(roles: Mapping[str, str]) -> str:
    kinds = ", ".join(f"{number} by {kind}" for kind, number in Counter(roles.values()).items())
    return f"tp splits layers: {kinds}; each worker has all others whole\n" if kinds else ""


def _show_all(as_json: bool) -> None:
    rows, documents = [], []
    for text in _ALL:
        one = as_strategy(text)
        layout = one.layout({"single": 1, "ddp + pp(2)": 4}.get(text, 2))
        steps = five_steps(one.sync_for(_with_other_data(layout)))
        _, _, reduce, update, pull = steps[0]
        rows.append([text, class_of(layout), reduce, "server" if steps[1:] else update, pull])
        documents.append({"strategy": text, "class": rows[-1][1], "steps": steps})
    title = "Table 11.2.1: single or multiple programs (SP, MP) and data (SD, MD)"
    table = plain_table(title, ["strategy", "class", *STEPS[2:]], rows, left=5)
    said = [f"{key}  {words}" for key, words in _CLASSES.items()]
    show({"strategies": documents}, [table, "", *said], as_json, wraps=True)


def _sent(
    strategy: Strategy,
    workers: int,
    folder: Path,
    stages: Sequence[Mapping[str, Any]],
) -> list[ExplainedExchange]:
    """A line on stderr says why some of it is not known."""
    try:
        return list(exchanges(strategy, workers, Subject(*read_trace(folder))))
    except ShoalError as error:
        found = list(exchanges(strategy, workers, None, stages))
        if any(one.sent_bytes is None for one in found):
            what = "what is sent inside of a replica is not known (?)"
            print(f"{what}: {error}", file=sys.stderr)
        return found


def _places(layout: Layout, rank: int) -> dict[str, int]:
    places = zip(AXES, layout.places[rank], layout.places[-1], strict=True)
    return {axis: at for axis, at, last in places if last}


def _held(strategy: Strategy, layout: Layout, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What each worker has: its place on the axes, layers, bytes, and samples."""
    batches = strategy.sync_for(layout.replicas).batches
    parts = layout.replicas * layout.ep
    samples = f"1/{parts} of a batch" if parts > 1 else "all"
    if found["batch"] and parts > 1:
        samples = f"{-(-found['batch'] // parts)} of {found['batch']}"
    of_all = {Batches.IN_TURNS: "whole batches", Batches.WHOLE_DATASET: f"1/{parts} of all"}
    samples = of_all.get(batches, samples)
    samples += f", 1/{layout.cp} of positions" if layout.cp > 1 else ""
    for rank, memory in enumerate(found["workers"]):
        places = _places(layout, rank)
        of_stage = found["held"][places.get("pp", 0)] if found["held"] else {"layers": []}
        owned = of_stage.get("owned")
        yield {
            "worker": rank,
            **{"axes": places, "layers": of_stage["layers"], "samples": samples},
            "updates": of_stage["layers"] if owned is None else owned[places.get("dp", 0)],
            **{kind: memory[kind] for kind in ("parameters", "gradients", "optimizer", "server")},
        }


def exchanges(
    strategy: Strategy,
    workers: int,
    traced: Subject | None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> Iterator[ExplainedExchange]:
    """Between replicas first, then inside of one, along each axis.

    Without a traced model the former are known from the parameters that each stage holds.
    """
    layout = strategy.layout(workers)
    term = strategy.sync_for(layout.replicas)
    question: SyncQuestion | None = None
    inside: dict[tuple[str, str], float] = {}
    if traced is not None:
        question, inside = _traced(strategy, workers, traced)
    elif stages:
        question = _of_parameters(layout, stages)
    if layout.replicas > 1 or term.has_servers:
        yield from _between_replicas(term, layout, question)
    for (axis, kind), num_bytes in inside.items():
        what, how = kind.split(": ")
        yield ExplainedExchange(what, how, layout.lines(axis), num_bytes)
    for axis in () if inside else ("pp", "ep", "cp", "tp"):
        if getattr(layout, axis) > 1:
            yield ExplainedExchange("activations", f"of {axis}", layout.lines(axis), None)


def _between_replicas(
    term: SyncTerm, layout: Layout, question: SyncQuestion | None
) -> Iterator[ExplainedExchange]:
    """What is exchanged of gradients, and of weights; the mean over workers."""
    replicas = layout.replicas
    steps = [step_of(term, _some_model(), replicas, 0)]
    if question is not None:
        steps = question.steps(term)
    sizes: dict[tuple[str, bool], dict[str, float]] = {}
    for one in (one for step in steps for one in step.exchanges):
        num_bytes = one.sent_bytes(replicas)
        if one.kind == "pull":
            num_bytes = 1.0 if question is None else question.buffer_bytes
        if num_bytes:
            named = "gradients" if one.what is What.GRADIENTS else "weights"
            kinds = sizes.setdefault((named, one.kind == "pull"), {})
            how = _how(one, term)
            kinds[how] = kinds.get(how, 0.0) + num_bytes / len(steps)
    for (named, _), kinds in sizes.items():
        sent = sum(kinds.values())
        shown = [how for how, num_bytes in kinds.items() if num_bytes >= _SMALL * sent]
        known = None if question is None else sent
        yield ExplainedExchange(named, ", ".join(shown), layout.lines("dp"), known)


def _how(exchange: Exchange, term: SyncTerm) -> str:
    how = "send to neighbours" if exchange.kind == "mix" else exchange.kind
    how += f" by {exchange.algorithm}" if exchange.algorithm else ""
    how += " twice" if exchange.when is When.BEFORE_UNIT else ""
    if exchange.every > 1:
        how += f", {counted(_meetings(term), 'step')} of {exchange.every}"
    return how


def _traced(
    strategy: Strategy, workers: int, traced: Subject
) -> tuple[SyncQuestion, dict[tuple[str, str], float]]:
    """The fullest stage, and what is sent in a step inside of its replica."""
    cluster = load_cluster("dgx-a100")
    node = replace(cluster.node, devices=workers)
    predictor = Predictor(traced.workload, replace(cluster, node=node, nodes=1))
    settings = PlanSettings(traced.batch)
    resolved = resolve_step(traced.workload, strategy, workers, settings)
    layout, split, microbatches, shape = resolved
    pricer = predictor.pricer(workers)
    priced = pricer.price(*resolved)
    question = predictor.question(pricer, resolved, priced, settings)
    table, stages = pricer.dealt(layout, split, shape)
    found: dict[tuple[str, str], float] = {}
    if layout.pp > 1:
        found["pp", "activations: send"] = microbatches * max(table.output_bytes[:-1])
    fullest = max(stages, key=sum)
    for run, count in enumerate(fullest):
        cost = traced.workload.cost(run, split)
        for message in (*cost.forward_messages, *cost.backward_messages):
            size = getattr(layout, message.axis)
            times = (2 if message.kind == "all_reduce" else 1) * (size - 1) / size
            key = (message.axis, f"activations: {message.kind}")
            found[key] = found.get(key, 0.0) + count * microbatches * times * message.bytes
    experts = sum(n * p for n, p in zip(fullest, table.expert_parameters, strict=True))
    for axis, own in (("cp", 0.0), ("ep", experts)):
        size = getattr(layout, axis)
        if size > 1:
            shared = (question.parameters - own) * question.precision.gradient_bytes
            found[axis, "gradients: all_reduce"] = 2 * (size - 1) / size * shared
    return question, found


def _of_parameters(layout: Layout, stages: Sequence[Mapping[str, Any]]) -> SyncQuestion:
    """The fullest stage."""
    cluster = load_cluster("dgx-a100")
    node = replace(cluster.node, devices=layout.workers)
    fullest = max(stages, key=lambda stage: float(stage["numel"]))
    precision = Precision(parameter_bytes=fullest["width"], gradient_bytes=fullest["width"])
    return SyncQuestion(
        Network(replace(cluster, node=node, nodes=1)),
        group_of(layout, "dp"),
        fullest["numel"],
        precision,
        compute_s=0.0,
        backward_s=0.0,
        microbatches=1,
        workers=layout.workers,
        is_stage=layout.pp > 1,
        adds_up=layout.ep > 1,
    )


def _lanes(strategy: Strategy, layout: Layout, servers: int) -> dict[str, list[str]]:
    """Workers and servers, each with its five steps."""
    term = strategy.sync_for(_with_other_data(layout))
    worker, *server = five_steps(term)
    lanes = {}
    for rank in range(min(layout.workers, _MOST_WORKERS)):
        stage = _places(layout, rank).get("pp")
        lanes[f"worker {rank}" + (f", stage {stage}" if stage is not None else "")] = worker
    inside = {"rank0": 1, "workers": len(lanes)}.get(getattr(term, "placement", ""), 0)
    names = [f"server {n}" for n in range(servers)] + [f"server in {n}" for n in [*lanes][:inside]]
    return lanes | {name: server[0] for name in names}


def _short(layers: Sequence[str]) -> str:
    if len(layers) <= 2:
        return ", ".join(layers) or "-"
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"


def _table_of_held(title: str, held: Sequence[Mapping[str, Any]], servers: list[int]) -> Table:
    places = list(held[0]["axes"])
    is_sharded = any(one["updates"] != one["layers"] for one in held)
    key = "updates" if is_sharded else "layers"
    head = "layers that it updates" if is_sharded else "layers with\nparameters"
    rows = []
    for one in held[:_MOST_WORKERS]:
        words = map(str, (one["worker"], *one["axes"].values(), _short(one[key]), one["samples"]))
        rows.append([*words, *(show_bytes(one[kind]) for kind in ("parameters", "optimizer"))])
    if len(held) > _MOST_WORKERS:
        rows.append([f"{len(held) - _MOST_WORKERS} more", *[""] * (len(places) + 4)])
    blank = [*[""] * len(places), "all it holds", ""]
    rows += [[f"server {n}", *blank, show_bytes(size), ""] for n, size in enumerate(servers)]
    heads = ["worker", *places, head, "samples", "params", "optimizer"]
    return plain_table(f"who holds what: {title}", heads, rows, left=len(places) + 3)


def _groups(over: Sequence[Sequence[int]]) -> str:
    shown = [f"{{{','.join(map(str, group[:8]))}{',..' * (len(group) > 8)}}}" for group in over[:4]]
    return " ".join(shown) + (f" and {len(over) - 4} more" if len(over) > 4 else "")


def _sent_row(one: ExplainedExchange) -> list[str]:
    size = "?" if one.sent_bytes is None else show_bytes(one.sent_bytes)
    return [one.what, one.kind, _groups(one.over), size]


_HUES = ("#cfe3f5", "#a9cbe8", "#f6d8a8", "#bfe3cf", "#f2c4cf")  # by step
_STYLE = ".box{stroke:#9aa5b1}.idle{fill:#fff;stroke:#c3cbd4;stroke-dasharray:4 3}"


def picture(
    title: str,
    held: Sequence[Mapping[str, Any]],
    lanes: Lanes,
    sent: Sequence[ExplainedExchange],
) -> str:
    """A row for each worker and server: what it holds, and its five steps; idle ones are white."""
    body = [drawing.text(24, 34, title, "title")]
    body += [drawing.text(330 + 130 * n, 66, step, "name") for n, step in enumerate(STEPS)]
    for row, (lane, cells) in enumerate(lanes.items()):
        top = 78 + 62 * row
        body.append(drawing.box((24, top), (290, 52), "box", rx=6, fill="#f1f4f7"))
        body.append(drawing.text(34, top + 20, lane, "name"))
        if row < len(held):
            one = held[row]
            words = f"{_short(one['layers'])[:34]}: {show_bytes(one['parameters'])}"
            body.append(drawing.text(34, top + 40, words, "note"))
        for n, cell in enumerate(cells):
            idle = cell == "-"
            fill = None if idle else _HUES[n]
            corner = (330 + 130 * n, top)
            body.append(drawing.box(corner, (122, 52), "idle" if idle else "box", rx=6, fill=fill))
            body.append(drawing.text(corner[0] + 8, top + 31, "" if idle else cell, "note"))
    bottom = 78 + 62 * len(lanes) + 22
    for n, exchange in enumerate(sent):
        words = "{}: {} over {}: {} a worker".format(*_sent_row(exchange))
        body.append(drawing.text(24, bottom + 20 * n, words, "note"))
    return drawing.document(
        title, (1000, bottom + 20 * len(sent) + 10), drawing.WORDS + _STYLE, body, "#fff"
    )
