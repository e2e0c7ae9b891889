"""`shoal pipeline`: what every schedule costs; `show` draws one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cluster.units import parse_seconds
from shoal.commands import options
from shoal.commands.options import option
from shoal.commands.output import plain_table, wide_console, write_text
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput
from shoal.plan.timeline import Time, Timeline, Times, draw, gantt_svg, simulate
from shoal.schedules.pipelines import check_sizes
from shoal.schedules.pipelines.catalog import CATALOG, build
from shoal.schedules.pipelines.proof import PipelineProof, prove

MOST_ACTIONS = 500_000
app = typer.Typer(help="Every pipeline schedule: proven, simulated, drawn.", no_args_is_help=True)


@dataclass(frozen=True)
class PipelineOptions:
    """The sizes of a pipeline, and the times of its actions."""

    stages: int = option("Number of stages of the model.", 4)
    microbatches: int = option("Number of micro-batches in a batch.", 8)
    chunks: int | None = option(
        "Pieces of the model on each stage, for interleaved and bfs.", show_default="2 there"
    )
    forward: str = option(
        "Time of a micro-batch's forward in a stage; or 1,2,…: of each stage.", "1"
    )
    backward: str = option("Time of the backward for the input.", "1")
    weight: str = option("Time of the backward for the weights.", "1")
    transfer: str = option("Time from a stage to the next.", "0")

    @property
    def times(self) -> Times:
        between = _time("transfer", self.transfer)
        if not isinstance(between, float):
            raise BadInput(f"--transfer takes one number, not {self.transfer!r}")
        forward = _time("forward", self.forward)
        backward = _time("backward", self.backward)
        return Times(forward, backward, _time("weight", self.weight), between)

    def timeline(self, name: str, chunks: int | None) -> tuple[Timeline, PipelineProof]:
        """Of a schedule, which is proven."""
        pipeline = build(name, self.stages, self.microbatches, chunks)
        return simulate(pipeline, self.times), prove(pipeline)

    def check(self, chunks: int) -> None:
        check_sizes(self.stages, self.microbatches, chunks)
        if self.stages * self.microbatches * chunks * 3 > MOST_ACTIONS:
            raise BadInput(
                f"{self.stages} stages, {self.microbatches} micro-batches and {chunks} chunks are "
                f"more than {MOST_ACTIONS:,} actions: ask for less"
            )


@app.command("list")
def table(asked: PipelineOptions, as_json: options.Json = False) -> None:
    """Compare all schedules: time, bubble, activations held."""
    schedules = []
    for entry in CATALOG.values():
        asked.check((asked.chunks or 2) if entry.looped else 1)
        schedules.append(asked.timeline(entry.name, asked.chunks if entry.looped else None))
    documents = [_document(*found, asked.times) for found in schedules]
    heads = ["schedule", "chunks", "time", "bubble", "idle", "holds at most", ""]
    rows = [
        [
            timeline.pipeline.name,
            str(timeline.pipeline.chunks),
            f"{timeline.makespan:.6g}",
            f"{timeline.bubble:.2%}",
            f"{timeline.idle:.2%}",
            f"{max(proof.peak_live) / timeline.pipeline.chunks:.3g}",
            CATALOG[timeline.pipeline.name].description.splitlines()[0],
        ]
        for timeline, proof in schedules
    ]
    title = f"{asked.stages} stages, {asked.microbatches} micro-batches"
    grid = plain_table(title, heads, rows, left=1)
    grid.columns[-1].justify = "left"
    show_parts({"schedules": documents}, [grid], as_json)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(CATALOG)}; or FILE.py:FUNCTION of your own")
    ],
    asked: PipelineOptions,
    svg: Path | None = option("Write a picture here."),
    as_json: options.Json = False,
) -> None:
    """Draw one schedule: what each stage does when.

    With its bubble, and the activations that stages hold.
    """
    asked.check(asked.chunks or 2)
    timeline, proof = asked.timeline(name, asked.chunks)
    if svg is not None:
        write_text(svg, gantt_svg(timeline, proof))
    if as_json or svg is not None:
        document = _document(timeline, proof, asked.times, with_actions=True)
        show_parts(document, [f"{timeline.pipeline}: {svg}"], as_json)
    else:
        draw(timeline, proof, wide_console())


def _time(option: str, text: str) -> Time:
    try:
        numbers = [parse_seconds(word) for word in text.split(",")]
    except BadInput as error:
        what = f"--{option} takes a number, or one for each stage as 1,2,1"
        raise BadInput(f"{what}, not {text!r}") from error
    return numbers if "," in text else numbers[0]


def _document(
    timeline: Timeline, proof: PipelineProof, times: Times, with_actions: bool = False
) -> dict[str, Any]:
    pipeline = timeline.pipeline
    stages: list[dict[str, Any]] = [
        {
            "work": timeline.work[stage],
            "bubble": timeline.bubbles[stage],
            "idle": 1 - timeline.work[stage] / timeline.makespan,
            "peak_live": proof.peak_live[stage],
            "peak_waiting_for_weight": proof.peak_waiting[stage],
        }
        for stage in range(pipeline.stages)
    ]
    if with_actions:
        for stage, spans in zip(stages, timeline.spans, strict=True):
            stage["actions"] = [
                {**span.action._asdict(), "kind": span.action.kind.value}
                | {"start": span.start, "end": span.end}
                for span in spans
            ]
    return {
        "schedule": pipeline.name,
        "microbatches": pipeline.microbatches,
        "chunks": pipeline.chunks,
        **asdict(times),
        "proven": True,
        "capacity_needed": proof.capacity,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "stages": stages,
    }
