"""`shoal memory`: what each worker holds under a strategy, and which strategies fit a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes, show_bytes
from shoal.commands import options
from shoal.commands.launching import (
    check_trained,
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.commands.options import option
from shoal.commands.output import plain_table, show
from shoal.errors import BadInput, CheckFailed, ShoalError
from shoal.plan.workloads import Split, Workload
from shoal.runtime.config import MemoryEstimateConfig, MemoryProbeConfig, WorkloadTraceConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.worker.auto import read_trace

_HEADS = {  # short, so that the columns fit 80 characters
    "parameters": "params",
    "gradients": "grads",
    "in_flight": "in\nflight",
    "host": "of the\nhost",
}
_USUAL = ("ddp", "zero(1)", "zero(2)", "zero(3)", "ps", "pp({n})", "tp({n})")
_MOST_LAYERS = 12  # shown of a deep model: the largest ones
_MOST_COLUMNS = 6
_UNEVEN = 1.25  # the largest shard over the smallest one, from which on a line says why
COLUMNS = ("parameters", "gathered", "gradients", "optimizer", "activations")
FURTHER = ("copies", "residuals", "in_flight", "shared", "server")  # shown where there are some
_KEYS = {"estimated": "workers", "servers": "servers", "unknown": "unknown"}  # of an estimate
_MAIN = ("parameters", "gradients", "optimizer", "activations")


def memory(
    script: options.Script,
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: options.Workers = 1,
    strategy: list[str] | None = option(
        "How to train on the workers; several are compared in one table.",
        None,
        "--strategy",
        "-s",
        show_default="ddp, or single for one worker; with --limit: all usual ones",
    ),
    limit: str | None = option("Say what fits into so much memory a device, such as 10GB."),
    measure: bool = option("Also train two steps, or a round of localsgd, and measure.", False),
    seed: int | None = options.SEED,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show how much memory each worker needs.

    Parameters, gradients, optimizer state, activations and what the strategy keeps (copies of
    weights, residuals of compression, messages in flight, shared segments, a server inside the
    worker), estimated without allocating them. With --limit, or several strategies: one table of
    what each needs, whether it fits, and which layers are the largest.
    """
    if limit is not None or len(strategy or ()) > 1:
        if measure:
            raise BadInput("--measure is for one strategy, without --limit")
        _compare(script, args, workers, strategy or (), limit, device == "cpu", as_json)
        return
    command = command_for(script, args)
    value = strategy_for(strategy[0] if strategy else None, workers, to_run=measure)
    with scratch_folder("memory") as folder:
        [found] = estimates(command, [value], workers, folder, device == "cpu")
        document = {name: found[key] for name, key in _KEYS.items()}
        document["notes"] = _notes(document["estimated"], value, workers)
        if servers := document["servers"]:
            each = "the server" if len(servers) == 1 else f"each of {len(servers)} servers"
            document["notes"].append(f"{each} needs {show_bytes(max(servers))}")
        if measure:
            rounds = value.sync_for(workers).meets_every
            probe = MemoryProbeConfig(folder, steps=max(2, rounds))
            config = replace(config_for(value, seed, device), memory_probe=probe)
            run_quietly(command, workers, config)
            document["measured"] = [
                json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)
            ]
    title = f"{script} under {value} on {counted(workers, 'worker')}"
    parts = [*_tables(document, title), *document["notes"]]
    show({"script": script, "strategy": str(value), **document}, parts, as_json)
    for why in () if as_json else document["unknown"]:
        print(f"activations are unknown without running the model: {why}", file=sys.stderr)


def estimates(
    command: list[str],
    strategies: Sequence[Strategy],
    workers: int,
    folder: Path,
    on_cpu: bool = False,
    traces: bool = False,
) -> list[dict[str, Any]]:
    """What workers and servers need, from one run of the script; a trace of it in the folder."""
    wanted = MemoryEstimateConfig(folder, "\n".join(map(str, strategies)), workers, on_cpu)
    config = config_for(as_strategy("single"), device="cpu")
    trace = WorkloadTraceConfig(folder if traces else None)
    run_quietly(command, 1, replace(config, memory_estimate=wanted, workload_trace=trace))
    file = folder / "estimate.json"
    check_trained(file)
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def _notes(rows: Sequence[dict[str, int | None]], strategy: Strategy, workers: int) -> list[str]:
    """Why workers that do the same hold different amounts."""
    layout = strategy.layout(workers)
    if layout.pp > 1 or not strategy.sync_for(layout.replicas).shards_state:
        return []
    held = [[row[column] or 0 for row in rows] for column in COLUMNS[:-1]]
    is_even = all(max(column) <= _UNEVEN * min(column) for column in held)
    why = "a shard is a run of whole parameters, and this model has few of them, or large ones"
    return [] if is_even else [f"shards are uneven: {why}"]


def _tables(document: dict[str, Any], title: str) -> list[Table]:
    """One table, or two where the columns are more than 80 characters wide."""
    rows = [*document["estimated"], *document.get("measured", [])]
    ordered = [*COLUMNS[:-1], *FURTHER, COLUMNS[-1]]
    optional = (*FURTHER, "gathered")
    columns = [c for c in ordered if c not in optional or any(row[c] for row in rows)]
    host = ["host"] if any(row["host"] for row in rows) else []
    heading = f"memory of each worker: {title}"
    if len(columns) <= _MOST_COLUMNS:
        return [_table(document, heading, columns, columns, host)]
    further = [column for column in columns if column in FURTHER]
    always = [column for column in columns if column not in FURTHER]
    kept = _table(document, "of which the strategy keeps", further, further, [])
    return [_table(document, heading, always, columns, host), kept]


def _table(
    document: dict[str, Any], title: str, shown: list[str], added: list[str], beside: list[str]
) -> Table:
    """The columns that are shown, the sum of those that are `added`, and what is beside it."""
    columns = [*shown, "sum", *beside]
    heads = [_HEADS.get(column, column) for column in columns]
    rows = [
        [f"{rank} {how}", *_cells({**row, "sum": sum(row[c] or 0 for c in added)}, columns)]
        for rank in range(len(document["estimated"]))
        for how in ("estimated", "measured")
        if how in document
        for row in [document[how][rank]]
    ]
    return plain_table(title, ["worker", *heads], rows, left=1)


def _cells(row: Mapping[str, int | None], columns: Sequence[str]) -> list[str]:
    """A sum is more than is known where activations are not."""
    texts = ["?" if n is None else show_bytes(n) for n in (row[column] for column in columns)]
    is_sum = [_is_unknown(row) and column in ("sum", "total") for column in columns]
    return [f"> {text}" if more else text for text, more in zip(texts, is_sum, strict=True)]


def _is_unknown(row: Mapping[str, Any]) -> bool:
    return row.get("activations", 0) is None


# ------------------------------------------------------------------------------ what fits


def _compare(
    script: str,
    args: Sequence[str] | None,
    workers: int,
    asked: Sequence[str],
    limit: str | None,
    on_cpu: bool,
    as_json: bool,
) -> None:
    """Print what each strategy needs; CheckFailed where none fits."""
    limit_bytes = limit_of(limit)
    usual = _USUAL if workers > 1 else ("single",)
    texts = asked or [text.format(n=workers) for text in usual]
    strategies = [strategy_for(text, workers, to_run=False) for text in texts]
    with scratch_folder("memory") as folder:
        found = estimates(command_for(script, args), strategies, workers, folder, on_cpu, True)
        try:
            layers = list(layer_needs(*read_trace(folder)))
        except ShoalError as error:
            layers = []
            if not as_json:
                print(error, file=sys.stderr)
    needs = [
        need_of(str(one), devices, limit_bytes, need.get("refused", ""))
        for one, need in zip(strategies, found, strict=True)
        for devices in [[] if "refused" in need else list(_devices(need, one, workers))]
    ]
    document = {"script": script, "workers": workers, "limit_bytes": limit_bytes}
    title = f"memory of {script} on {counted(workers, 'worker')}"
    tables = _what_fits(title, needs, layers, limit_bytes)
    show({**document, "strategies": needs, "layers": layers}, tables, as_json)
    if all(need["fits"] is False for need in needs):
        raise CheckFailed(_none_fits(needs, layers, limit_bytes))


def limit_of(text: str | None) -> int | None:
    found = None if text is None else parse_bytes(text)
    if found is not None and found <= 0:
        raise BadInput(f"--limit {text} leaves no memory")
    return found


def need_of(
    strategy: str, devices: Sequence[dict[str, Any]], limit_bytes: int | None, refused: str = ""
) -> dict[str, Any]:
    """A strategy fits where its fullest device does; None: that is not known."""
    most = max((device["total"] for device in devices), default=0)
    fits = not refused and (limit_bytes is None or most <= limit_bytes)
    if fits and limit_bytes is not None and any(map(_is_unknown, devices)):
        fits = None
    need = {"strategy": strategy, "most": most, "devices": devices, "fits": fits}
    return need | ({"refused": refused} if refused else {})


def _devices(found: dict[str, Any], strategy: Strategy, workers: int) -> Iterator[dict[str, Any]]:
    """The fullest worker of each stage, and the fullest server."""
    layout = strategy.layout(workers)
    per_stage = layout.ep * layout.cp * layout.tp
    for stage in range(layout.pp):
        where = f"stage {stage}" if layout.pp > 1 else "each worker" if workers > 1 else "worker"
        of_stage = [
            _device(where, row)
            for rank, row in enumerate(found["workers"])
            if rank // per_stage % layout.pp == stage
        ]
        yield max(of_stage, key=lambda device: device["total"])
    if found["servers"]:
        where = "each server" if len(found["servers"]) > 1 else "the server"
        yield _device(where, dict.fromkeys(_MAIN, 0) | {"server": max(found["servers"])})


def _device(where: str, row: Mapping[str, int | None]) -> dict[str, Any]:
    """What a worker or server needs; activations are None where they are unknown."""
    held = {name: row[name] or 0 for name in _MAIN} | {"activations": row["activations"]}
    host = row.get("host") or 0
    total = sum(value or 0 for value in row.values()) - host
    other = total - sum(value or 0 for value in held.values())
    return {"where": where, **held, "other": other, "total": total, "host": host}


def layer_needs(workload: Workload, batch: int) -> Iterator[dict[str, Any]]:
    """What each layer needs on one device: its numbers, their gradients and state, activations."""
    precision = workload.precision
    width = precision.parameter_bytes + precision.gradient_bytes
    width += precision.master_bytes + precision.state_bytes
    for index, run in enumerate(workload.runs):
        cost = workload.cost(index, Split(microbatch=batch, flash_attention=True))
        state = round(cost.parameters * width)
        held = round(cost.activation_bytes)
        sizes = {"state": state, "activations": held, "total": state + held}
        yield {"layer": run.name, "count": run.count, **sizes}


def _none_fits(
    needs: list[dict[str, Any]], layers: list[dict[str, Any]], limit_bytes: int | None
) -> str:
    able = [need for need in needs if "refused" not in need]
    if limit_bytes is None or not able:
        return "none of the strategies can train this model"
    least = min(able, key=lambda need: need["most"])
    text = f"nothing fits into {show_bytes(limit_bytes)}: {least['strategy']} needs the least, "
    text += show_bytes(least["most"])
    largest = max(layers, key=lambda layer: layer["total"], default=None)
    if largest is not None and largest["total"] > limit_bytes:
        text += f"; layer {largest['layer']} alone needs {show_bytes(largest['total'])}: split it "
        text += "over more devices (tp, zero(3))"
    return text


def _what_fits(
    title: str, needs: list[dict[str, Any]], layers: list[dict[str, Any]], limit_bytes: int | None
) -> Iterator[Table | str]:
    def verdict(row: Mapping[str, Any]) -> str:
        if limit_bytes is None:
            return ""
        return "too large" if row["total"] > limit_bytes else "?" if _is_unknown(row) else "fits"

    size = "" if limit_bytes is None else show_bytes(limit_bytes)
    columns = [*_MAIN, "other", "total"]
    heads = ["strategy", "device", "params", "grads", "optimizer", "activations", "other", "sum"]
    if any(device["host"] for need in needs for device in need["devices"]):
        columns.append("host")
        heads.append(_HEADS["host"])
    rows = [
        [
            *("" if number else need["strategy"], device["where"]),
            *_cells(device, columns),
            verdict(device),
        ]
        for need in needs
        for number, device in enumerate(need["devices"])
    ]
    refused = [need for need in needs if "refused" in need]
    rows += [[need["strategy"], "", *["-"] * len(columns), "refused"] for need in refused]
    yield plain_table(title + (f", {size} each" if size else ""), [*heads, ""], rows, left=2)
    yield from (f"{need['strategy']}: {need['refused']}" for need in refused)
    if layers:
        largest = sorted(layers, key=lambda layer: -layer["total"])[:_MOST_LAYERS]
        title = "one device, whole batch, by layer"
        title += f" (the {_MOST_LAYERS} largest)" if len(layers) > _MOST_LAYERS else ""
        heads = ["layer", "times", "params, grads,\noptimizer", "activations", "each", ""]
        rows = [
            [
                *(layer["layer"], str(layer["count"])),
                *_cells(layer, ["state", "activations", "total"]),
                verdict(layer),
            ]
            for layer in layers
            if layer in largest
        ]
        yield plain_table(title, heads, rows, left=1)
    if size:
        fitting = ", ".join(need["strategy"] for need in needs if need["fits"])
        unknown = ", ".join(need["strategy"] for need in needs if need["fits"] is None)
        text = f"within {size} a device: {fitting or 'none of them'}"
        yield text + (f"; not known of {unknown}" if unknown else "")
