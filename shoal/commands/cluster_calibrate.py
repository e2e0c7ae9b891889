"""`shoal cluster calibrate`: measure this machine and write it as a cluster file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shoal.calibration.cache import keep
from shoal.calibration.measure import CalibrationOptions, calibrate, check_seconds
from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import Device, MeasuredCalls
from shoal.cluster.toml_writer import cluster_text
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.commands import options
from shoal.commands.calibrate_between import measure_between
from shoal.commands.launching import check_folder
from shoal.commands.output import plain_table, wide_console, write_text
from shoal.errors import BadInput


def calibrate_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The cluster file to write.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="The most workers at the same time.", show_default="the cores"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
    device: options.Device = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Measure between the hosts of an engine instead."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="With --on: the cluster file that it is added to."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, in about a minute; with --on the network between hosts.

    Products by size, memory, launches, updates and collectives, with 1, 2, 4, … workers at the
    same time. The figures are medians; their spread is that between quartiles. They are also kept
    for `-s auto`.

    Between hosts: all-reduces over Shoal's TCP and over Gloo. `shoal run --on ENGINE --cluster
    FILE` takes the one that was faster.
    """
    check_folder(output, "a cluster file")
    check_seconds(seconds)
    if on is not None:
        measure_between(on, cluster, output, workers, seconds, as_json)
        return
    if cluster is not None:
        raise BadInput("--cluster is the file that figures between hosts are added to: give --on")
    _calibrate_here(output, workers, seconds, device, as_json)


def _calibrate_here(
    output: Path | None, workers: int | None, seconds: float, device: str | None, as_json: bool
) -> None:
    cluster = calibrate(CalibrationOptions(workers, seconds, device), _say)
    text = cluster_text(cluster)
    kept = keep(cluster, device) if workers is None else None
    if output is not None:
        write_text(output, text)
    if kept is None and output is None and not as_json:
        raise BadInput("the cache folder cannot be written: name a file with -o")
    written = [str(path) for path in (output, kept) if path is not None]
    if as_json:
        print(json.dumps({"files": written, "cluster": msgspec.toml.decode(text)}))
        return
    _print(cluster)
    print(f"written to {' and '.join(written)}")


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)


def _print(cluster: Cluster) -> None:
    console = wide_console()
    known = cluster.node.crowded or ((1, cluster.device),)
    heads = ["figure", *(f"{n} worker{'s'[: n > 1]}" for n, _ in known)]
    table = plain_table(f"{cluster.name}: medians (quartiles)", heads, left=1)
    for name, values in _rows([device for _, device in known]):
        table.add_row(name, *values)
    console.print(table)
    calls = plain_table("\ncalls between workers", _call_heads(cluster), left=3)
    for one in cluster.node.measured:
        calls.add_row(one.executor, one.kind, str(one.ranks), *_call_row(one))
    if cluster.node.measured:
        console.print(calls)


def _rows(devices: list[Device]) -> Iterator[tuple[str, list[str]]]:
    yield "threads of a worker", [str(device.threads or "–") for device in devices]
    for dtype in devices[0].peak_flops:
        key = f"peak_flops.{dtype}"
        rates = [_spread(d.peak_flops[dtype], d.spread.get(key), _flops) for d in devices]
        yield f"products, {dtype}", rates
    for size in (1e6, 1e8):
        shares = [f"{device.matmul_efficiency.at(size):.0%}" for device in devices]
        yield f"  of it with {size:.0e} operations", shares
    for name, key, show in _FIGURES:
        yield name, [_spread(getattr(d, key), d.spread.get(key), show) for d in devices]


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _bytes(value: float) -> str:
    return f"{show_bytes(value)}/s"


_FIGURES: tuple[tuple[str, str, Any], ...] = (
    ("memory", "memory_bytes_per_s", _bytes),
    ("launch, forward", "launch_s", show_seconds),
    ("launch, backward", "backward_launch_s", show_seconds),
    ("update", "update_bytes_per_s", _bytes),
    ("update, one kernel", "update_launch_s", show_seconds),
    ("hand over to the next stage", "wait_s", show_seconds),
    ("meet in a call", "meet_s", show_seconds),
    ("fixed cost of a step", "step_s", show_seconds),
    ("  more with a server", "served_step_s", show_seconds),
    ("  of it the server's", "request_s", show_seconds),
    ("asynchronous pushes", "served_bytes_per_s", show_rate),
)


def _spread(value: float | None, spread: tuple[float, float] | None, show: Any) -> str:
    if value is None:
        return "–"
    around = "" if spread is None else f" ({show(spread[0])}–{show(spread[1])})"
    return f"{show(value)}{around}"


_SHOWN_BYTES = (1 << 10, 1 << 20, 1 << 24)


def _call_heads(cluster: Cluster) -> list[str]:
    return ["executor", "call", "ranks", *map(show_bytes, _SHOWN_BYTES), "large"]


def _call_row(calls: MeasuredCalls) -> list[str]:
    (size, seconds) = calls.points[-1]
    times = [show_seconds(calls.seconds(shown)) for shown in _SHOWN_BYTES]
    return [*times, show_rate(size / seconds)]
