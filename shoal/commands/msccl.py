"""`shoal collectives export` and `import`: MSCCL algorithm files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shoal.cluster.units import (
    parse_bytes,
    parse_s_per_byte,
    parse_seconds,
    show_bytes,
    show_seconds,
)
from shoal.commands import options
from shoal.commands.output import wide_console, write_text
from shoal.plan.price import price
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.proof import prove
from shoal.schedules.drawing.svg import animated_svg
from shoal.schedules.drawing.terminal import draw
from shoal.schedules.msccl.compile import compile_program
from shoal.schedules.msccl.read import read_collective
from shoal.schedules.msccl.write import program_xml, runtime_limits


def export(
    kind: Annotated[str, typer.Argument(help="all_reduce, all_gather, all_to_all, …")],
    name: Annotated[str, typer.Argument(help="ring, tree, …; or FILE.py:FUNCTION of your own")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The XML file to write.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 8,
    root: Annotated[int, typer.Option(help="The root of a broadcast, reduce, …")] = 0,
    node: Annotated[int | None, typer.Option(help="For hierarchical: ranks in a node.")] = None,
    rack: Annotated[int | None, typer.Option(help="For hierarchical: nodes in a rack.")] = None,
) -> None:
    """Write one algorithm, proven, as an MSCCL XML file."""
    given = {key: value for key, value in (("node", node), ("rack", rack)) if value is not None}
    collective = build(kind, name, ranks, root, **given)
    prove(collective)
    program = compile_program(collective)
    write_text(output, program_xml(program))
    blocks = sum(len(gpu.blocks) for gpu in program.gpus)
    steps = sum(len(block.steps) for _, _, block in program.blocks())
    typer.echo(f"{collective}: {output} ({blocks} thread blocks, {steps} steps)")
    limits = runtime_limits(program)
    if limits:
        typer.echo(f"shoal: note: {limits}", err=True)


def import_file(
    file: Annotated[Path, typer.Argument(help="An MSCCL XML file.")],
    size: Annotated[str, typer.Option("--bytes", help="Size of the vector: 100MB.")] = "100MB",
    alpha: Annotated[str, typer.Option(help="Time of a message: 10us.")] = "10us",
    beta: Annotated[str, typer.Option(help="Cost of a byte: 10GB/s, 80Gb/s.")] = "10GB/s",
    show: Annotated[bool, typer.Option("--show", help="Draw it round by round.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write an animated picture here.")] = None,
    prove_it: Annotated[bool, typer.Option("--prove", help="Prove it, do not price it.")] = False,
    as_json: options.Json = False,
) -> None:
    """Read an MSCCL XML file, prove that it does what it is for, and price it."""
    cost = (parse_seconds(alpha), parse_s_per_byte(beta))
    num_bytes = parse_bytes(size)
    collective = read_collective(file)
    priced = price(collective, num_bytes, *cost)
    if svg is not None:
        write_text(svg, animated_svg(collective))
    if as_json:
        typer.echo(json.dumps({"file": str(file), "proven": True, **priced.as_dict()}))
        return
    if show:
        draw(collective, wide_console())
    count = collective.table.num_transfers
    typer.echo(
        f"{collective} is proven: {len(collective.rounds)} rounds, {count} transfers, and every "
        "rank ends with exactly what it should have."
    )
    if not prove_it:
        typer.echo(
            f"{show_bytes(num_bytes)}: {show_seconds(priced.time_s)}, busiest port "
            f"{show_bytes(priced.busiest_bytes)}, sent in all "
            f"{show_bytes(priced.sent_total_bytes)}, extra memory "
            f"{show_bytes(priced.extra_memory_bytes)}."
        )
