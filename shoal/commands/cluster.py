"""`shoal cluster`: draw a cluster, and find out what this machine is."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cluster.cluster import Cluster
from shoal.cluster.discover import Discovery
from shoal.cluster.discover import discover as discover_host
from shoal.cluster.drawing import draw_cluster, host_lines
from shoal.cluster.levels import levels, narrowest, narrowest_cut
from shoal.cluster.presets import load_cluster, preset_names
from shoal.cluster.svg import cluster_svg
from shoal.cluster.toml_writer import cluster_text
from shoal.commands import options
from shoal.commands.cluster_calibrate import calibrate_command
from shoal.commands.output import show as show_parts
from shoal.commands.output import wide_console, write_text
from shoal.errors import BadInput

app = typer.Typer(help="Clusters: drawn, discovered, measured.", no_args_is_help=True)
app.command("calibrate")(calibrate_command)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="FILE|PRESET", help=f"A file, or {', '.join(preset_names())}.")
    ],
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.")] = None,
    racks: Annotated[int | None, typer.Option(min=1, help="Number of racks they are in.")] = None,
    oversubscription: Annotated[
        float | None, typer.Option(min=1, help="Of the uplinks: 4 for 1:4.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Draw a cluster with the bandwidth of every level, and name the narrowest cut."""
    cluster = resized(load_cluster(name), nodes, racks, oversubscription)
    if svg is not None:
        write_text(svg, cluster_svg(cluster))
    if as_json or svg is not None:
        show_parts(document(cluster), [f"{cluster.name}: {svg}"], as_json)
    else:
        draw_cluster(cluster, wide_console())


@app.command()
def discover(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a cluster file here.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """What this machine is made of: cores, NUMA nodes, memory, GPUs and their links, NICs.

    Nothing is measured; `shoal cluster calibrate` does that.
    """
    found = discover_host()
    if output is not None:
        write_text(output, _file_text(found))
    if not as_json:
        show_parts(None, [*host_lines(found.host), ""], as_json)
        draw_cluster(found.cluster, wide_console())
    found_document = {"host": asdict(found.host), "cluster": document(found.cluster)}
    written = [] if output is None else [f"Written: {output}"]
    notes = list(found.notes)
    show_parts({**found_document, "notes": notes}, [*notes, *written], as_json)


def _file_text(found: Discovery) -> str:
    comments = "".join(f"# {note}\n" for note in found.notes)
    return f"# Read by `shoal cluster discover`, not measured.\n{comments}" + cluster_text(
        found.cluster
    )


def resized(
    cluster: Cluster, nodes: int | None, racks: int | None, oversubscription: float | None
) -> Cluster:
    """The same nodes in other numbers; `nodes` counts those of all racks."""
    total = nodes or max(cluster.nodes, racks or 1)
    if total > 1 and cluster.node.nic is None:
        raise BadInput(f"--nodes {total}: a node of {cluster.name} has no nic to reach another")
    if racks is not None and racks > total:
        raise BadInput(f"--racks {racks}: give at least as many --nodes as racks, not {total}")
    if racks is not None and total % racks:
        raise BadInput(f"--racks {racks}: {total} nodes do not fill {racks} racks evenly")
    per_rack = cluster.nodes_per_rack if racks is None else total // racks
    if nodes is not None and per_rack is not None and total > per_rack and total % per_rack:
        raise BadInput(f"--nodes {total}: they do not fill racks of {per_rack}; give --racks, too")
    resized = replace(cluster, nodes=total, nodes_per_rack=per_rack)
    if oversubscription is None:
        return resized
    if not math.isfinite(oversubscription):
        raise BadInput("--oversubscription: a number is expected, such as 4 for 1:4")
    if resized.racks == 1:
        raise BadInput("--oversubscription is between racks, and there is one rack: give --racks 2")
    return replace(resized, oversubscription=oversubscription)


def document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as data, in seconds and bytes."""
    found = narrowest(cluster)
    return {
        **_plain_curves(asdict(cluster)),
        "devices": cluster.devices,
        "racks": cluster.racks,
        "levels": [
            {**asdict(level), "device_bytes_per_s": level.device_bytes_per_s}
            for level in levels(cluster)
        ],
        "narrowest": None if found is None else found.name,
        "narrowest_cut": narrowest_cut(cluster),
    }


def _plain_curves(fields: dict[str, Any]) -> dict[str, Any]:
    crowded = [device for _, device in fields["node"]["crowded"]]
    for device in (fields["device"], *crowded):
        for curve in ("matmul_efficiency", "memory_efficiency"):
            device[curve] = device[curve]["points"]
    return fields
