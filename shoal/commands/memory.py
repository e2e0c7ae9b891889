"""`shoal memory`: the memory of a worker under a strategy, estimated, or also measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cluster.units import show_bytes
from shoal.commands import options
from shoal.commands.launching import (
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.commands.memory_limit import MemoryQuestion, estimates, fits
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput
from shoal.runtime.config import MemoryProbeConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.strategy.strategy import Strategy

_HEADS = {  # short, so that the columns fit 80 characters
    "parameters": "params",
    "gradients": "grads",
    "in_flight": "in\nflight",
}
_MOST_COLUMNS = 6
_UNEVEN = 1.25  # the largest shard over the smallest one, from which on a line says why
COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations")
FURTHER = ("copies", "residuals", "in_flight", "shared", "server")  # shown where there are some


def memory(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.Workers = 1,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="How to train on the workers; several are compared in one table.",
            show_default="ddp, or single for one worker; with --limit: all usual ones",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help="Say what fits into so much memory a device, such as 10GB."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Also train two steps, or a round of localsgd, and measure.")
    ] = False,
    seed: options.Seed = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show how much memory each worker needs.

    Parameters, gradients, optimizer state, activations and what the strategy keeps (copies of
    weights, residuals of compression, messages in flight, shared segments, a server inside the
    worker), estimated without allocating them. With --limit, or several strategies: one table of
    what each needs, whether it fits, and which layers are the largest.
    """
    command = command_for(script, args)
    if limit is not None or len(strategy or ()) > 1:
        if measure:
            raise BadInput("--measure is for one strategy, without --limit")
        fits(script, args, MemoryQuestion(workers, tuple(strategy or ()), limit), as_json)
        return
    value = strategy_for(strategy[0] if strategy else None, workers, to_run=measure)
    with scratch_folder("memory") as folder:
        [found] = estimates(command, [value], workers, folder)
        document = {"estimated": found["workers"], **found}
        document.pop("workers")
        document["notes"] = _notes(document["estimated"], value, workers)
        if measure:
            rounds = value.sync_for(workers).round_steps
            probe = MemoryProbeConfig(folder, steps=max(2, rounds))
            config = replace(config_for(value, seed, device), memory_probe=probe)
            run_quietly(command, workers, config)
            document["measured"] = [
                json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)
            ]
    if as_json:
        print(json.dumps({"script": script, "strategy": str(value), **document}))
    else:
        _print(document, f"{script} under {value} on {counted(workers, 'worker')}")


def _print(document: dict[str, Any], title: str) -> None:
    console = wide_console()
    for table in _tables(document, title):
        console.print(table)
    for note in document["notes"]:
        console.print(note)
    for why in document["unknown"]:
        print(f"activations are unknown without running the model: {why}", file=sys.stderr)


def _notes(rows: Sequence[dict[str, int | None]], strategy: Strategy, workers: int) -> list[str]:
    """Why workers that do the same hold different amounts."""
    layout = strategy.layout(workers)
    if layout.pp > 1 or not strategy.sync_for(layout.replicas).shards_state:
        return []
    held = [[row[column] or 0 for row in rows] for column in COLUMNS[:-1]]
    if all(max(column) <= _UNEVEN * min(column) for column in held):
        return []
    return [
        "shards are uneven: a shard is a run of whole parameters, and this model has few of them, "
        "or large ones"
    ]


def _tables(document: dict[str, Any], title: str) -> list[Table]:
    """One table, or two where the columns are more than 80 characters wide."""
    columns = _shown([*document["estimated"], *document.get("measured", [])])
    heading = f"memory of each worker: {title}"
    if len(columns) <= _MOST_COLUMNS:
        return [_table(document, heading, [columns, columns])]
    further = [column for column in columns if column in FURTHER]
    always = [column for column in columns if column not in FURTHER]
    return [
        _table(document, heading, [always, columns]),
        _table(document, "of which the strategy keeps", [further, further]),
    ]


def _table(document: dict[str, Any], title: str, columns: Sequence[list[str]]) -> Table:
    """`columns` are those shown, and those whose sum is shown."""
    shown, added = columns
    heads = [_HEADS.get(column, column) for column in (*shown, "sum")]
    table = plain_table(title, ["worker", *heads], left=1)
    measured = document.get("measured")
    for rank, row in enumerate(document["estimated"]):
        table.add_row(f"{rank} estimated", *_cells(row, shown), _sum(row, added))
        if measured:
            found = measured[rank]
            table.add_row(f"{rank} measured", *_cells(found, shown), _sum(found, added))
    return table


def _shown(rows: list[dict[str, int | None]]) -> list[str]:
    further = {*FURTHER, "gathered"}
    ordered = [*COLUMNS[:-1], *FURTHER, COLUMNS[-1]]
    return [c for c in ordered if c not in further or any(row[c] for row in rows)]


def _cells(row: dict[str, int | None], columns: list[str]) -> list[str]:
    numbers = [row[column] for column in columns]
    return ["?" if n is None else show_bytes(n) for n in numbers]


def _sum(row: dict[str, int | None], columns: list[str]) -> str:
    return show_bytes(sum(row[column] or 0 for column in columns))
