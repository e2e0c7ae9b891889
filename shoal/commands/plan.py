"""`shoal plan`: every valid strategy within memory, ranked, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cluster import Cluster
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.goodput import FailureOptions, goodput_parts
from shoal.commands.launching import strategy_for
from shoal.commands.options import option
from shoal.commands.output import Part, bold, show
from shoal.commands.planning import FoundPlan, PlannedStrategy, as_plan
from shoal.commands.subject import Subject, SubjectOptions, hidden_axes
from shoal.plan.search import OnPriced, SearchOptions, search
from shoal.runtime.wording import counted


def plan(
    asked: SubjectOptions,
    failing: FailureOptions,
    workers: options.Workers = 1,
    include_async: bool = option(
        "Also list strategies whose result is not that of one device.", False, "--include-async"
    ),
    top: int = option("How many strategies to show.", 5, min=1),
    explain: str | None = option("Say why this strategy is not the first.", None, "--why"),
    hide: str = option("Communication that runs beside computing: of tp, ep, pp.", ""),
    as_json: options.Json = False,
) -> None:
    """Find the fastest strategies for a model on a cluster, and say why.

    All valid strategies that fit the memory are ranked by their predicted time, each with its range
    (80% of published runs of its kind) and the places that it may have: plans inside the range of
    each other are equal. The notation can be pasted after -s. With --mtbf they are ranked by what
    failures leave of the time. Nothing is trained.
    """
    hardware, failures = failing.on(asked.hardware(workers), workers)
    subject = asked.subject(workers)
    hidden = hidden_axes(hide)
    settings = replace(asked.settings(subject.batch), failures=failures, hide=hidden)
    value = None if explain is None else strategy_for(explain, workers, to_run=False)
    wanted = SearchOptions(settings, top, include_async, value)
    with _progress(as_json) as on_priced:
        result = search(subject.workload, hardware, workers, wanted, on_priced)
    found = as_plan(result)
    notes = asked.notes(subject, workers)
    document = {
        "model": subject.workload.name,
        "cluster": hardware.name,
        "workers": workers,
        "batch": subject.batch,
        "ranked": [_entry(one) for one in found.ranked],
        "too_large": [_entry(one) for one in found.too_large],
        "asynchronous": [_entry(one) for one in found.asynchronous],
        "nothing_fits": found.nothing_fits,
        "why": found.asked,
        "variants": result.variants,
        "priced": result.priced,
        "notes": notes,
    }
    on = f"{counted(workers, 'worker')} of {hardware.name}"
    heading = bold(f"{subject.workload.name} on {on}, batch {subject.batch}")
    counts = (
        f"\n{result.variants} variants of strategies, {result.priced} of them priced: the others "
        "are slower than the slowest one here, or larger; plans whose places overlap are equal "
        "within their ranges"
    )
    first = found.ranked[0].prediction.goodput if found.ranked else None
    useful = [] if first is None else goodput_parts(first, hardware)
    said = [f"\n{explain}: {found.asked}"] if found.asked else []
    costs = _costs(found, hardware, subject) if found.ranked else ""
    lines = [heading, *_parts(found), *useful, *said, *filter(None, [costs]), counts, *notes]
    show(document, lines, as_json, wraps=True)
    if not result.ranked:
        raise typer.Exit(1)


@contextmanager
def _progress(quiet: bool) -> Iterator[OnPriced]:
    """A bar on stderr, on a terminal only."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(
        TextColumn("searching"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("search", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parts(found: FoundPlan) -> Iterator[Part]:
    if found.ranked and found.ranked[0].prediction.goodput:
        yield f"{'step':>13} {'range':>20}  {'memory':>7}  useful"
    for number, one in enumerate(found.ranked):
        first, last = one.place
        mark = f"{first}-{last}" if last > first else str(first)
        line, *more = _lines(mark, one)
        yield line
        if number == 0:
            yield from more
    for title, mark, others in (
        ("\nfaster, and too large", "-", found.too_large),
        ("\nnot the result of one device", "~", found.asynchronous),
    ):
        if others:
            yield bold(title)
        for one in others:
            yield next(_lines(mark, one))
    if found.nothing_fits:
        yield found.nothing_fits


def _lines(mark: str, one: PlannedStrategy) -> Iterator[str]:
    prediction = one.prediction
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.0%}"
    between = f"({show_seconds(prediction.low_s)} to {show_seconds(prediction.high_s)})"
    useful = ""
    answer = ""
    if prediction.goodput is not None:
        best = prediction.goodput.best
        useful = f"{best.shares.useful:>6.1%}  "
        answer = f"{best.name}, {best.strategy}: {show_seconds(best.effective_s)} for a step's work"
    yield (
        f"{mark:>4}  {show_seconds(prediction.step_s):>7} {between:>20}"
        f"  {show_bytes(prediction.memory.total):>7}  {useful}"
        f"{f'{one.strategy}  {one.options}'.rstrip()}"
    )
    merged = f"not better: {', '.join(one.merged)}" if one.merged else ""
    said = f"{one.why}{utilization}"
    if host := prediction.memory.host:
        said += f"; {show_bytes(host)} a worker in the host's memory"
    for line in (said, answer, one.in_script, prediction.convergence, merged):
        if line:
            yield f"      {line}"


def _costs(found: FoundPlan, hardware: Cluster, subject: Subject) -> str:
    """Of the first, where nodes have a price and samples are sequences."""
    price = hardware.node.price_per_hour
    sequence = subject.workload.limits.cp
    if price is None or sequence <= 1:
        return ""
    first = found.ranked[0].prediction
    nodes = -(-first.workers // hardware.node.devices)
    cost = nodes * price * first.effective_s / 3600 / (first.batch * sequence / 1e6)
    return f"\nthe first costs {cost:.3g} a million tokens, at {price:g} a node and hour"


def _entry(one: PlannedStrategy) -> dict[str, Any]:
    words = {key: getattr(one, key) for key in ("options", "in_script", "why", "merged", "place")}
    return {**one.prediction.as_dict(), **words}
