"""`shoal lab`: hosts, switches and shaped links on this machine, in network namespaces."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from shoal.cluster.drawing import draw_cluster
from shoal.cluster.presets import load_cluster
from shoal.cluster.units import show_rate
from shoal.commands import options
from shoal.commands.cluster import document
from shoal.commands.options import argument, option
from shoal.commands.output import show as show_parts
from shoal.commands.output import wide_console
from shoal.errors import BadInput
from shoal.launch.lab.design import MTU, LabDesign, parse_rate
from shoal.launch.lab.lab import Lab, build_lab, find_lab, known_labs, refuse_built_now, remove_lab
from shoal.launch.lab.namespaces import require
from shoal.runtime.lab_files import DEFAULT_LAB, LabFiles
from shoal.runtime.wording import counted

app = typer.Typer(
    help="A lab: hosts, switches and shaped links in network namespaces of this machine.",
    no_args_is_help=True,
)
_NAME_OF_LAB = "Which lab, where there are several."
LabName = Annotated[str | None, typer.Argument(metavar="NAME", help=_NAME_OF_LAB)]
NameOption = Annotated[str | None, typer.Option("--name", help="The same as NAME.")]


@app.command()
def up(
    hosts: int = option("Number of hosts.", 4, min=1),
    racks: int = option("Number of racks they are in.", 1, min=1),
    link: str = option("Rate of the link of a host, each way, as 1Gb/s or 100MB/s.", "1Gb/s"),
    oversubscription: float = option("Of the uplinks of racks: 4 for 1:4.", 1.0, min=1),
    mtu: int = option("Largest packet of a link, in bytes.", MTU),
    workers_per_host: int = option("Devices of a host in the cluster file.", 1, min=1, max=64),
    name: str = option("Name of the lab.", DEFAULT_LAB),
    as_json: options.Json = False,
) -> None:
    """Build a lab. Needs root; `shoal lab down` removes it."""
    rate = parse_rate(link)
    design = LabDesign(name, hosts, racks, rate, oversubscription, mtu, workers_per_host)
    _show(build_lab(design), as_json)
    if not as_json:
        run = f"shoal run --on {_address(design)} -n {hosts * workers_per_host} SCRIPT"
        typer.echo(f"\nRun on it: {run}; remove it: shoal lab down {name}")


@app.command()
def show(name: LabName = None, named: NameOption = None, as_json: options.Json = False) -> None:
    """Draw a lab with the bandwidth of every level, and list its hosts."""
    _show(find_lab(_one_name(name, named)), as_json)


@app.command()
def down(
    name: LabName = None,
    named: NameOption = None,
    remove_all: bool = option("Remove all labs of this machine.", False, "--all"),
) -> None:
    """Remove a lab, and what a killed `shoal lab up` has left; processes in it are killed."""
    name = _one_name(name, named)
    if name is not None and remove_all:
        raise BadInput("shoal lab down takes a name or --all, not both")
    require()
    known = known_labs()
    wanted = name or (known[0] if len(known) == 1 else DEFAULT_LAB)
    if not remove_all and wanted not in known:
        raise BadInput(
            f"there are several labs: name one of {', '.join(known)}, or give --all"
            if name is None and known
            else f"there is no lab {wanted!r}"
        )
    for one in known if remove_all else [wanted]:
        refuse_built_now(one)
        ended = remove_lab(one)
        processes = f", and {counted(ended, 'process', 'processes')} in it killed"
        typer.echo(f"lab {one} is removed{processes if ended else ''}")
    if remove_all and not known:
        typer.echo("there is no lab")


@app.command("exec", context_settings={"ignore_unknown_options": True})
def execute(
    host: str = argument("h0, h1, …", ..., metavar="HOST"),
    command: list[str] = argument("", ..., metavar="-- COMMAND"),
    name: str | None = option(_NAME_OF_LAB),
) -> None:
    """Run a command on one host of a lab; the exit status is the command's, or 2."""
    namespace = find_lab(name).host(host).namespace
    require()
    if shutil.which(command[0]) is None:  # hosts of a lab have the files of this machine
        raise BadInput(f"{host} has no program {command[0]!r}: name one on the PATH, or its file")
    words = namespace.command(command)
    sys.stdout.flush()
    os.execvp(words[0], words)


def _one_name(name: str | None, named: str | None) -> str | None:
    if name is not None and named is not None and name != named:
        raise BadInput(f"NAME is {name!r} and --name is {named!r}: give one of them")
    return name if named is None else named


def _show(lab: Lab, as_json: bool) -> None:
    design = lab.design
    file = LabFiles(design.name).cluster
    cluster = load_cluster(file)
    if not as_json:
        draw_cluster(cluster, wide_console())
    rate = show_rate(design.link_bytes_per_s * design.efficiency)
    racks = [f"rack {host.rack}" if design.racks > 1 else "the switch" for host in lab.hosts]
    lines = [
        "",
        *(f"{h.name:4} {h.address:12} at {at}" for h, at in zip(lab.hosts, racks, strict=True)),
        f"MTU {design.mtu}: {design.efficiency:.1%} of a link is payload of TCP, {rate}; the rest "
        "is headers.",
        f"Cluster file: {file} (--cluster {_address(design)})",
    ]
    found = {
        "name": design.name,
        "mtu": design.mtu,
        "link_bytes_per_s": design.link_bytes_per_s,
        "uplink_bytes_per_s": design.uplink_bytes_per_s if design.racks > 1 else None,
        "hosts": [
            {key: getattr(host, key) for key in ("name", "address", "rack", "device")}
            | {"namespace": host.namespace.name}
            for host in lab.hosts
        ],
        "cluster_file": str(file),
        "cluster": document(cluster),
    }
    show_parts(found, lines, as_json)


def _address(design: LabDesign) -> str:
    """What --on and --cluster take."""
    return "lab" if design.name == DEFAULT_LAB else f"lab://{design.name}"
