"""`shoal trace`: what was recorded by `--trace`, for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.commands.output import write_text
from shoal.errors import BadInput
from shoal.observe.trace import read_chrome
from shoal.plan.chakra.from_spans import ChakraTrace, to_chakra
from shoal.plan.chakra.nodes import write_nodes

app = typer.Typer(help="Traces of runs: export them.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Traces of runs: export them."""


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="What `shoal run --trace FILE` wrote.")],
    chakra: Annotated[Path, typer.Option(help="A name NAME for NAME.0.et, NAME.1.et, …")],
    step: Annotated[int | None, typer.Option(help="This step alone.")] = None,
) -> None:
    """Write a trace as Chakra execution traces, one file per rank."""
    if not chakra.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {chakra.absolute().parent} for the traces")
    trace = to_chakra(read_chrome(file), step)
    for rank, nodes in trace.nodes_by_rank.items():
        write_nodes(chakra.with_name(f"{chakra.name}.{rank}.et"), nodes)
    total = sum(map(len, trace.nodes_by_rank.values()))
    typer.echo(f"{total} nodes of {len(trace.nodes_by_rank)} ranks: {chakra}.RANK.et")
    _write_groups(trace, chakra)
    if trace.lonely:
        typer.echo(f"{trace.lonely} messages with one end in the trace are left out")


def _write_groups(trace: ChakraTrace, chakra: Path) -> None:
    """Groups of some of the ranks, as ASTRA-sim takes them (--comm-group-configuration)."""
    if not trace.groups:
        return
    path = chakra.with_name(f"{chakra.name}.groups.json")
    write_text(path, json.dumps({one.name: list(one.ranks) for one in trace.groups}, indent=2))
    typer.echo(f"groups of ranks: {path}")
