"""`shoal memory`: the memory of a worker under a strategy, estimated, or also measured."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.commands import options
from shoal.commands.launching import (
    check_trained,
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.commands.output import wide_console
from shoal.commands.units import show_bytes
from shoal.runtime.config import MemoryEstimateConfig, MemoryProbeConfig
from shoal.strategy.strategy import Strategy, as_strategy

COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations")
FURTHER = ("copies", "residuals", "in_flight", "shared", "server")  # shown where there are some


def memory(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.Workers = 1,
    strategy: options.Strategy = None,
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
    worker), estimated without allocating them.
    """
    command = command_for(script, args)
    value = strategy_for(strategy, workers, to_run=measure)
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as name:
        folder = Path(name)
        document = _estimate(command, value, workers, folder)
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
        _print(document, f"{script} under {value} on {workers} workers")


def _estimate(command: list[str], strategy: Strategy, workers: int, folder: Path) -> dict[str, Any]:
    estimate = MemoryEstimateConfig(folder, str(strategy), workers)
    config = config_for(as_strategy("single"), device="cpu")
    run_quietly(command, 1, replace(config, memory_estimate=estimate))
    file = folder / "estimate.json"
    check_trained(file)
    estimate = json.loads(file.read_text())
    return {"estimated": estimate["workers"], "unknown": estimate["unknown"]}


def _print(document: dict[str, Any], title: str) -> None:
    table = Table(title=f"memory of each worker: {title}", title_justify="left")
    table.add_column("worker")
    measured = document.get("measured")
    columns = _shown([*document["estimated"], *(measured or [])])
    for column in (*columns, "together"):
        table.add_column(column.replace("_", " "), justify="right")
    for rank, row in enumerate(document["estimated"]):
        table.add_row(f"{rank} estimated", *_cells(row, columns))
        if measured:
            table.add_row(f"{rank} measured", *_cells(measured[rank], columns), end_section=True)
    wide_console().print(table)
    for why in document["unknown"]:
        print(f"activations are unknown without running the model: {why}", file=sys.stderr)


def _shown(rows: list[dict[str, int | None]]) -> list[str]:
    further = [column for column in FURTHER if any(row[column] for row in rows)]
    return [*COLUMNS[:-1], *further, COLUMNS[-1]]


def _cells(row: dict[str, int | None], columns: list[str]) -> list[str]:
    numbers = [row[column] for column in columns]
    together = sum(number for number in numbers if number is not None)
    return [*("?" if n is None else show_bytes(n) for n in numbers), show_bytes(together)]
