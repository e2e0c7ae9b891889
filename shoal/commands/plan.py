"""`shoal plan`: every valid strategy within memory, ranked, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.output import Part, bold, show
from shoal.commands.subject import Subject, SubjectOptions
from shoal.plan.explain import in_script, nothing_fits, options_of, why
from shoal.plan.search import OnPriced, Priced, SearchOptions, SearchResult, search
from shoal.runtime.wording import counted

Top = Annotated[int, typer.Option(min=1, help="How many strategies to show.")]
IncludeAsync = Annotated[
    bool,
    typer.Option(
        "--include-async", help="Also list strategies whose result is not that of one device."
    ),
]


@options.with_fields
def plan(
    asked: SubjectOptions,
    workers: options.Workers = 1,
    include_async: IncludeAsync = False,
    top: Top = 10,
    as_json: options.Json = False,
) -> None:
    """Find the fastest strategies for a model on a cluster, and say why.

    All valid strategies that fit the memory are ranked by their predicted time; the notation can
    be pasted after -s. Nothing is trained.
    """
    hardware = asked.hardware(workers)
    subject = asked.subject(workers)
    wanted = SearchOptions(asked.settings(subject.batch), top, include_async)
    with _progress(as_json) as on_priced:
        result = search(subject.workload, hardware, workers, wanted, on_priced)
    document = _document(subject, hardware.name, workers, result)
    show(document, _parts(subject, hardware.name, workers, result), as_json)
    if not result.ranked:
        raise typer.Exit(1)


@contextmanager
def _progress(quiet: bool) -> Iterator[OnPriced]:
    """A bar on stderr, on a terminal only."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("searching"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("search", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parts(subject: Subject, cluster: str, workers: int, result: SearchResult) -> Iterator[Part]:
    hardware = f"{counted(workers, 'worker')} of {cluster}"
    yield bold(f"{subject.workload.name} on {hardware}, batch {subject.batch}")
    for number, one in enumerate(result.ranked, 1):
        yield from _lines(f"{number:>2}", one, result.ranked[0])
    if result.too_large:
        yield bold("\nfaster, and too large")
    for one in result.too_large:
        yield from _lines(" -", one, one)
    if result.asynchronous:
        yield bold("\nnot the result of one device")
    for one in result.asynchronous:
        yield from _lines(" ~", one, result.asynchronous[0])
    if not result.ranked:
        yield nothing_fits(result.least, result.least_workers)
    yield (
        f"\n{result.variants} variants of strategies, {result.priced} of them priced: the others "
        "are slower than the slowest one here, or larger"
    )


def _lines(mark: str, one: Priced, best: Priced) -> Iterator[str]:
    prediction = one.prediction
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.0%}"
    further = options_of(one.candidate.settings)
    yield (
        f"{mark}  {show_seconds(one.seconds):>7}  {show_bytes(prediction.memory.total):>7}"
        f"  {one.candidate.strategy}{'  ' + further if further else ''}"
    )
    merged = f"not better: {', '.join(one.merged)}" if one.merged else ""
    reason = f"{why(one, best)}{utilization}"
    for line in (reason, _in_script(one), prediction.convergence, merged):
        if line:
            yield f"      {line}"


def _in_script(one: Priced) -> str:
    tried = one.candidate
    return in_script(tried.strategy, tried.settings, one.prediction.microbatches)


def _document(subject: Subject, cluster: str, workers: int, result: SearchResult) -> dict[str, Any]:
    best = result.ranked[0] if result.ranked else None
    return {
        "model": subject.workload.name,
        "cluster": cluster,
        "workers": workers,
        "batch": subject.batch,
        "ranked": [_entry(one, best or one) for one in result.ranked],
        "too_large": [_entry(one, one) for one in result.too_large],
        "asynchronous": [_entry(one, result.asynchronous[0]) for one in result.asynchronous],
        "nothing_fits": None if best else nothing_fits(result.least, result.least_workers),
        "variants": result.variants,
        "priced": result.priced,
    }


def _entry(one: Priced, best: Priced) -> dict[str, Any]:
    return {
        **one.prediction.as_dict(),
        "options": options_of(one.candidate.settings),
        "in_script": _in_script(one),
        "why": why(one, best),
        "merged": list(one.merged),
    }
