"""`shoal plan`: every valid strategy within memory, ranked, each with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.output import wide_console
from shoal.commands.predict import MicroBatch
from shoal.commands.subject import (
    Batch,
    ClusterName,
    FlashAttention,
    Gpt,
    Limit,
    Model,
    Network,
    Precision,
    Subject,
    cluster_of,
    subject_of,
)
from shoal.plan.explain import in_script, nothing_fits, options_of, why
from shoal.plan.predict import PlanSettings
from shoal.plan.ranking import Priced
from shoal.plan.search import OnPriced, SearchOptions, SearchResult, search
from shoal.runtime.wording import counted

Top = Annotated[int, typer.Option(min=1, help="How many strategies to show.")]
IncludeAsync = Annotated[
    bool,
    typer.Option(
        "--include-async", help="Also list strategies whose result is not that of one device."
    ),
]


def plan(
    model: Model = None,
    args: options.ScriptArgs = None,
    workers: options.Workers = 1,
    cluster: ClusterName = "this-machine",
    gpt: Gpt = None,
    network: Network = None,
    limit: Limit = None,
    batch: Batch = None,
    microbatch: MicroBatch = None,
    precision: Precision = None,
    flash_attention: FlashAttention = False,
    include_async: IncludeAsync = False,
    top: Top = 10,
    as_json: options.Json = False,
) -> None:
    """Find the fastest strategies for a model on a cluster, and say why.

    All valid strategies that fit the memory are ranked by their predicted time; the notation can
    be pasted after -s. Nothing is trained.
    """
    hardware = cluster_of(cluster, network, limit, workers)
    subject = subject_of(model, args, gpt, precision, batch, workers)
    settings = PlanSettings(subject.batch, microbatch, flash_attention=flash_attention)
    wanted = SearchOptions(settings, top, include_async)
    with _progress(as_json) as on_priced:
        result = search(subject.workload, hardware, workers, wanted, on_priced)
    if as_json:
        print(json.dumps(_document(subject, hardware.name, workers, result)))
    else:
        _print(subject, hardware.name, workers, result)
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


def _print(subject: Subject, cluster: str, workers: int, result: SearchResult) -> None:
    console = wide_console()
    hardware = f"{counted(workers, 'worker')} of {cluster}"
    title = f"{subject.workload.name} on {hardware}, batch {subject.batch}"
    console.print(title, style="bold")
    for number, one in enumerate(result.ranked, 1):
        _print_one(console, f"{number:>2}", one, result.ranked[0])
    if result.too_large:
        console.print("\nfaster, and too large", style="bold")
        for one in result.too_large:
            _print_one(console, " -", one, one)
    if result.asynchronous:
        console.print("\nnot the result of one device", style="bold")
        for one in result.asynchronous:
            _print_one(console, " ~", one, result.asynchronous[0])
    if not result.ranked:
        console.print(nothing_fits(result.least, result.least_workers))
    console.print(
        f"\n{result.variants} variants of strategies, {result.priced} of them priced: the others "
        "are slower than the slowest one here, or larger"
    )


def _print_one(console: Console, mark: str, one: Priced, best: Priced) -> None:
    prediction = one.prediction
    utilization = "" if prediction.mfu is None else f", MFU {prediction.mfu:.0%}"
    further = options_of(one.candidate.settings)
    console.print(
        f"{mark}  {show_seconds(one.seconds):>7}  {show_bytes(prediction.memory.total):>7}"
        f"  {one.candidate.strategy}{'  ' + further if further else ''}",
        soft_wrap=True,
    )
    console.print(f"      {why(one, best)}{utilization}", soft_wrap=True)
    for line in (_in_script(one), prediction.convergence):
        if line:
            console.print(f"      {line}", soft_wrap=True)
    if one.merged:
        console.print(f"      not better: {', '.join(one.merged)}", soft_wrap=True)


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
