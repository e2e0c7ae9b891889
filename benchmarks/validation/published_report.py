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
from benchmarks.validation.cross import KindRange, leave_one_out, ranges
from benchmarks.validation.fit import Fitted
from benchmarks.validation.published import PublishedTable, published_tables
from benchmarks.validation.report import fitted_table
from shoal.cluster.presets import load_cluster
from shoal.commands import options
from shoal.commands.output import plain_table, show

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

    Each table is predicted by constants that were fitted to all other tables of its GPU, one set a
    GPU. Prints the errors by table, and the range of 80% of the rows by kind, which `shoal plan`
    and `shoal predict` have. It takes some minutes.
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
    kinds = ranges(held)
    document = {
        "tables": [_entry(*pair) for pair in pairs],
        "ranges": {one.kind: [one.low, one.high, one.covered] for one in kinds},
        "fitted": {name: fitted.values for name, fitted in fits.items()},
    }
    show(document, _parts(pairs, kinds, fits), as_json)


def _entry(table: PublishedTable, rows: Sequence[Compared]) -> dict[str, object]:
    errors = [row.error for row in rows]
    sizes = [abs(error) for error in errors]
    return {
        "table": table.name,
        "gpu": table.cluster,
        "rows": len(rows),
        "median_error": statistics.median(sizes),
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
        ]
        for one in entries
    ]
    return plain_table("", ["table", "cluster", "rows", "median", "mean", "bias"], rows, left=2)


def _parts(
    pairs: Sequence[Rows], kinds: Sequence[KindRange], fits: dict[str, Fitted]
) -> Iterator[Table | str]:
    yield _table(pairs)
    heads = ["measured / predicted", "rows", "from", "to", "covers"]
    rows = [
        [one.kind, str(one.rows), f"{one.low:.2f}", f"{one.high:.2f}", f"{one.covered:.0%}"]
        for one in kinds
    ]
    yield plain_table("\nranges", heads, rows, left=1)
    for name, fitted in fits.items():
        yield f"\n{name}"
        yield fitted_table(fitted)
