"""`python -m benchmarks published`: predictions against every published table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.status_line import status_line
from benchmarks.validation.compare import Compared
from benchmarks.validation.compare import validate as compare
from benchmarks.validation.cross import leave_one_out
from benchmarks.validation.fit import Fitted
from benchmarks.validation.published import PublishedTable, published_tables
from benchmarks.validation.report import fitted_table
from benchmarks.validation.sources import (
    Ratios,
    leave_sources_out,
    ranges_of,
    ratios_of,
    source_rows,
)
from shoal.cluster.presets import load_cluster
from shoal.commands import options
from shoal.commands.output import plain_table, show
from shoal.plan.accuracy import DENSE, RANGES

_LOW, _HIGH = RANGES[DENSE, "16 bits"]
Rows = tuple[PublishedTable, Sequence[Compared]]


def published(
    more: Annotated[
        Path | None, typer.Option(help="A folder with the tables of vTrain (CSV), too.")
    ] = None,
    as_presets_are: Annotated[
        bool, typer.Option("--presets", help="Fit nothing: predict with presets as they are.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare predictions with every published table.

    Each table is predicted by constants that were fitted to all other sources of its GPU, one set a
    GPU; those of `sources.py` by presets. Prints the errors by table, the ranges that `shoal plan`
    and `shoal predict` have, and how many rows of a source are in those of the others. It takes
    some minutes.
    """
    tables = published_tables(more)
    if as_presets_are:
        found = [(one, compare(one.rows, load_cluster(one.cluster), one.runs_as)) for one in tables]
        pairs: list[Rows] = [(table, result.rows) for table, result in found]
        show({"tables": [_entry(*pair) for pair in pairs]}, [_table(pairs)], as_json)
        return
    with status_line() as say:
        held, fits = leave_one_out(tables, say)
    pairs = [(one.table, one.rows) for one in held]
    ratios = ratios_of(source_rows())
    document = {
        "tables": [_entry(*pair) for pair in pairs],
        "ranges": ranges_of(ratios),
        "sources": leave_sources_out(ratios),
        "fitted": {name: fitted.values for name, fitted in fits.items()},
    }
    show(document, _parts(pairs, ratios, fits), as_json)


def _entry(table: PublishedTable, rows: Sequence[Compared]) -> dict[str, object]:
    errors = [row.error for row in rows]
    sizes = [abs(error) for error in errors]
    return {
        "table": table.name,
        "gpu": table.cluster,
        "rows": len(rows),
        "median_error": statistics.median(sizes),
        "inside": sum(_LOW <= 1 / (1 + error) <= _HIGH for error in errors) / len(errors),
        "mean_error": statistics.fmean(sizes),
        "bias": statistics.median(errors),
    }


def _table(pairs: Sequence[Rows]) -> Table:
    entries = [_entry(*pair) for pair in pairs]
    rows = [
        [
            *(str(one[key]) for key in ("table", "gpu", "rows")),
            *(f"{one[key]:.1%}" for key in ("median_error", "mean_error")),
            f"{one['bias']:+.1%}",
            f"{one['inside']:.0%}",
        ]
        for one in entries
    ]
    return plain_table(
        "", ["table", "cluster", "rows", "median", "mean", "bias", "inside"], rows, left=2
    )


def _parts(pairs: Sequence[Rows], ratios: Ratios, fits: dict[str, Fitted]) -> Iterator[Table | str]:
    yield _table(pairs)
    rows = [[kind, f"{low:.2f}", f"{high:.2f}"] for kind, (low, high) in ranges_of(ratios).items()]
    yield plain_table("\nranges", ["measured / predicted", "from", "to"], rows, left=1)
    rows = [
        [source, str(number), f"{error:.0%}", str(inside)]
        for source, (number, error, inside) in leave_sources_out(ratios).items()
    ]
    heads = ["left out", "rows", "median error", "inside"]
    yield plain_table("\nin ranges of the other sources", heads, rows, left=1)
    for name, fitted in fits.items():
        yield f"\n{name}"
        yield fitted_table(fitted)
