"""Writes docs/algorithms.md and docs/pipelines.md: `python -m benchmarks.docs`."""

from __future__ import annotations

import io
import sys
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from shoal.plan.timeline import Timeline, draw, simulate
from shoal.schedules.collectives.catalog import CATALOG, Algorithm, build
from shoal.schedules.collectives.cost import Link, Price, price
from shoal.schedules.pipelines import catalog as pipelines
from shoal.schedules.pipelines.proof import prove

PATH = Path("docs/algorithms.md")
PIPELINES = Path("docs/pipelines.md")
RANKS = (4, 7, 8, 16)
_HEAD = """# Collective algorithms

This file is generated from the schedules: `python -m benchmarks.docs`.

V is the size of a rank's whole vector. *Rounds* are those in which something is sent.
*Busiest port* is what the busiest rank carries, in V: per round the larger of what it sends and
what it receives. *Total* is what all ranks send together, in V. *Extra memory* is room beyond
input and output, in V, on the rank that needs the most. The time model is described in
`shoal/schedules/collectives/cost.py`.
"""
_PIPELINES_HEAD = """# Pipeline schedules

This file is generated from the schedules: `python -m benchmarks.docs`.

p stages, stage s of them, m micro-batches, v chunks a stage. F is forward, B the whole backward,
I the gradient of the input and W that of the weights. The pictures are of 4 stages and 4
micro-batches, in the tables F, I and W take 1 in a stage, and so B takes 2. *Bubble* is the share
of the longest stage's time, from its first action to its last, in which it waits; *idle* that of
all stages, from the first action of all to the last. *Holds* is the most micro-batches whose
activations a stage keeps, from stage 0 on; with chunks, of one chunk. *Room* is how many messages
a channel between two stages must hold so that it cannot hang.
"""
_SIZES = ((4, 4), (4, 8), (8, 32))


def document() -> str:
    parts = [_HEAD]
    for kind, family in CATALOG.items():
        parts.append(f"\n## {kind}\n")
        parts += [_section(entry) for entry in family.values()]
    return "".join(parts)


def pipeline_document() -> str:
    return "".join([_PIPELINES_HEAD, *map(_pipeline_section, pipelines.CATALOG.values())])


def gantt(timeline: Timeline) -> str:
    """The chart alone, without names: a line for each stage, of any length; · is the bubble."""
    out = io.StringIO()
    draw(timeline, prove(timeline.pipeline), Console(file=out, width=100_000))
    rows = [line for line in out.getvalue().splitlines() if line.startswith("stage ")]
    return "\n".join(line.partition("  ")[2] for line in rows)


def _pipeline_section(entry: pipelines.PipelineSchedule) -> str:
    picture = gantt(simulate(pipelines.build(entry.name, 4, 4)))
    text = f"\n## {entry.name}\n\n{entry.description}\n\n```\n{picture}\n```\n\n"
    text += "| stages | micro-batches | chunks | time | bubble | idle | holds | room |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for stages, microbatches in _SIZES:
        pipeline = pipelines.build(entry.name, stages, microbatches)
        timeline = simulate(pipeline)
        proof = prove(pipeline)
        text += f"| {stages} | {microbatches} | {pipeline.chunks} | {timeline.makespan:g} "
        text += f"| {timeline.bubble:.1%} | {timeline.idle:.1%} "
        text += f"| {' '.join(map(str, proof.peak_live))} | {proof.capacity} |\n"
    return text


def _section(entry: Algorithm) -> str:
    text = f"\n### {entry.kind}: {entry.name}\n\n{_prose(entry.description)}\n"
    text += "| ranks | rounds | busiest port | total | extra memory |\n|---|---|---|---|---|\n"
    for ranks in RANKS:
        one = price(build(entry.kind, entry.name, ranks), 1, Link(0.0, 1.0))
        text += f"| {ranks} | {one.rounds} | {' | '.join(_in_v(one))} |\n"
    return text


def _prose(description: str) -> str:
    """The docstring, with its pictures as code blocks."""
    blocks = []
    for block in description.split("\n\n"):
        picture = block.startswith("    ")
        blocks.append(f"```\n{block}\n```\n" if picture else f"{block}\n")
    return "\n".join(blocks)


def _in_v(one: Price) -> list[str]:
    amounts = (one.busiest_bytes, one.sent_total_bytes, one.extra_memory_bytes)
    return [str(Fraction(amount).limit_denominator(10_000)) for amount in amounts]


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
    PIPELINES.write_text(pipeline_document(), encoding="utf-8")
    sys.stdout.write(f"{PATH} and {PIPELINES} are written\n")
