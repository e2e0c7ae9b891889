"""`shoal cluster`: draw a cluster, and find out what this machine is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import typer

from shoal.cluster import Cluster, drawing
from shoal.cluster.discover import discover as discover_host
from shoal.cluster.hardware import Device, MeasuredCalls
from shoal.cluster.presets import load_cluster, preset_names
from shoal.cluster.toml_file import cluster_text
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.commands import options
from shoal.commands.launching import check_folder
from shoal.commands.options import argument, option
from shoal.commands.output import Part, plain_table, wide_console, write_text
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput
from shoal.observe.calibration.measure import calibrate, check_seconds, keep
from shoal.runtime.wording import say


def calibrate_command(
    output: Path | None = option("The cluster file to write.", None, "--output", "-o"),
    workers: int | None = option(
        "The most workers at the same time.", min=1, max=1024, show_default="the cores"
    ),
    seconds: float = option("How long it may take; what is left out is said.", 60.0),
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, in about a minute.

    Products by size, memory, launches, updates and collectives, with 1, 2, 4, … workers at the
    same time. The figures are medians; their spread is that between quartiles. They are also kept
    for `-s auto`.
    """
    check_folder(output, "a cluster file")
    check_seconds(seconds)
    measured = calibrate(say, seconds, workers, device)
    text = cluster_text(measured)
    kept = keep(measured, device) if workers is None else None
    if output is not None:
        write_text(output, text)
    written = [str(path) for path in (output, kept) if path is not None]
    where = f"written to {' and '.join(written)}" if written else "not kept: name a file with -o"
    document = {"files": written, "cluster": msgspec.toml.decode(text)}
    show_parts(document, [*_figures(measured), where], as_json)


def _figures(cluster: Cluster) -> Iterator[Part]:
    known = cluster.node.crowded or ((1, cluster.device),)
    heads = ["figure", *(f"{n} worker{'s'[: n > 1]}" for n, _ in known)]
    rows = [[name, *values] for name, values in _rows([device for _, device in known])]
    yield plain_table(f"{cluster.name}: medians (quartiles)", heads, rows, left=1)
    if cluster.node.measured:
        heads = ["executor", "call", "ranks", *map(show_bytes, _SHOWN_BYTES), "large"]
        rows = [_call_row(one) for one in cluster.node.measured]
        yield plain_table("\ncalls between workers", heads, rows, left=3)


def _rows(devices: list[Device]) -> Iterator[tuple[str, list[str]]]:
    yield "threads of a worker", [str(device.threads or "–") for device in devices]
    for dtype in devices[0].peak_flops:
        key = f"peak_flops.{dtype}"
        form = drawing.show_flops
        rates = [_spread(d.peak_flops[dtype], d.spread.get(key), form) for d in devices]
        yield f"products, {dtype}", rates
    for size in (1e6, 1e8):
        shares = [f"{device.matmul_efficiency.at(size):.0%}" for device in devices]
        yield f"  of it with {size:.0e} operations", shares
    for name, key, form in _FIGURES:
        yield name, [_spread(getattr(d, key), d.spread.get(key), form) for d in devices]


_FIGURES: tuple[tuple[str, str, Any], ...] = (
    ("memory", "memory_bytes_per_s", lambda rate: f"{show_bytes(rate)}/s"),
    ("launch, forward", "launch_s", show_seconds),
    ("launch, backward", "backward_launch_s", show_seconds),
    ("update", "update_bytes_per_s", lambda rate: f"{show_bytes(rate)}/s"),
    ("update, one kernel", "update_launch_s", show_seconds),
    ("hand over to the next stage", "wait_s", show_seconds),
    ("meet in a call", "meet_s", show_seconds),
    ("fixed cost of a step", "step_s", show_seconds),
    ("  more with a server", "served_step_s", show_seconds),
    ("  of it the server's", "request_s", show_seconds),
    ("asynchronous pushes", "served_bytes_per_s", show_rate),
)


def _spread(value: float | None, spread: tuple[float, float] | None, form: Any) -> str:
    if value is None:
        return "–"
    around = "" if spread is None else f" ({form(spread[0])}–{form(spread[1])})"
    return f"{form(value)}{around}"


_SHOWN_BYTES = (1 << 10, 1 << 20, 1 << 24)


def _call_row(calls: MeasuredCalls) -> list[str]:
    (size, seconds) = calls.points[-1]
    times = [show_seconds(calls.seconds(shown)) for shown in _SHOWN_BYTES]
    call = [calls.executor, calls.kind, str(calls.ranks)]
    return [*call, *times, show_rate(size / seconds)]


app = typer.Typer(help="Clusters: drawn, discovered, measured.", no_args_is_help=True)
app.command("calibrate")(calibrate_command)


@app.command()
def show(
    name: str = argument(f"A file, or {', '.join(preset_names())}.", ..., metavar="FILE|PRESET"),
    nodes: int | None = option("Number of nodes.", min=1),
    racks: int | None = option("Number of racks they are in.", min=1),
    oversubscription: float | None = option("Of the uplinks: 4 for 1:4.", min=1),
    svg: Path | None = option("Write a picture here."),
    as_json: options.Json = False,
) -> None:
    """Draw a cluster with the bandwidth of every level, and name the narrowest cut."""
    cluster = resized(load_cluster(name), nodes, racks, oversubscription)
    if svg is not None:
        write_text(svg, drawing.cluster_svg(cluster))
    if as_json or svg is not None:
        show_parts(document(cluster), [f"{cluster.name}: {svg}"], as_json)
    else:
        drawing.draw_cluster(cluster, wide_console())


@app.command()
def discover(
    output: Path | None = option("Write a cluster file here.", None, "--output", "-o"),
    as_json: options.Json = False,
) -> None:
    """What this machine is made of: cores, NUMA nodes, memory, GPUs and their links, NICs.

    Nothing is measured; `shoal cluster calibrate` does that.
    """
    found = discover_host()
    if output is not None:
        comments = ["Read by `shoal cluster discover`, not measured.", *found.notes]
        head = "".join(f"# {line}\n" for line in comments)
        write_text(output, head + cluster_text(found.cluster))
    if not as_json:
        show_parts(None, [*drawing.host_lines(found.host), ""], as_json)
        drawing.draw_cluster(found.cluster, wide_console())
    found_document = {"host": asdict(found.host), "cluster": document(found.cluster)}
    written = [] if output is None else [f"Written: {output}"]
    notes = list(found.notes)
    show_parts({**found_document, "notes": notes}, [*notes, *written], as_json)


def resized(
    cluster: Cluster, nodes: int | None, racks: int | None, oversubscription: float | None
) -> Cluster:
    """The same nodes in other numbers; `nodes` counts those of all racks."""
    total = nodes or max(cluster.nodes, racks or 1)
    if total > 1 and cluster.node.nic is None:
        raise BadInput(f"--nodes {total}: a node of {cluster.name} has no nic to reach another")
    if racks is not None and total % racks:
        raise BadInput(f"--racks {racks}: {total} nodes do not fill {racks} racks evenly")
    per_rack = cluster.nodes_per_rack if racks is None else total // racks
    if nodes is not None and per_rack is not None and total > per_rack and total % per_rack:
        raise BadInput(f"--nodes {total}: they do not fill racks of {per_rack}; give --racks, too")
    resized = replace(cluster, nodes=total, nodes_per_rack=per_rack)
    if oversubscription is None:
        return resized
    if resized.racks == 1:
        raise BadInput("--oversubscription is between racks, and there is one rack: give --racks 2")
    return replace(resized, oversubscription=oversubscription)


def document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as data, in seconds and bytes."""
    found = drawing.narrowest(cluster)
    return {
        **_plain_curves(asdict(cluster)),
        "devices": cluster.devices,
        "racks": cluster.racks,
        "levels": [
            {**asdict(level), "device_bytes_per_s": level.device_bytes_per_s}
            for level in drawing.levels(cluster)
        ],
        "narrowest": None if found is None else found.name,
        "narrowest_cut": drawing.narrowest_cut(cluster),
    }


def _plain_curves(fields: dict[str, Any]) -> dict[str, Any]:
    crowded = [device for _, device in fields["node"]["crowded"]]
    for device in (fields["device"], *crowded):
        for curve in ("matmul_efficiency", "memory_efficiency"):
            device[curve] = device[curve]["points"]
    return fields
