"""Arguments and options that several commands share, with their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Script = Annotated[str, typer.Argument(help="A script that calls shoal.run, or an example.")]
Workers = Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of workers.")]
On = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Run on hosts that an engine lends: lab or lab://NAME (see shoal lab), "
        "ray or ray://HOST:PORT.",
        show_default="this host",
    ),
]
RunCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="A cluster file or preset: its racks give the order of hosts, and what is "
        "summed up inside racks first; with --on, what was measured between hosts (shoal "
        "cluster calibrate --on) chooses TCP or Gloo.",
        show_default="what the engine knows",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help='How to train on the workers, such as "ddp(bucket_mb=4)"; run and train take auto.',
        show_default="ddp, or single for one worker",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of weights, order of samples and dropout.", show_default="0"),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is one")
]
Trace = Annotated[
    Path | None, typer.Option(help="Write a Chrome trace here, and print where the time went.")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        help="Slow a worker or server down: 1:4x makes worker 1 four times slower, "
        "server:1:4x server 1; repeatable."
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR[:every=STEPS]",
        help="Save in DIR every 100 steps or as many as given, and when the run is preempted; "
        "continue from what is there.",
    ),
]
Resume = Annotated[
    bool, typer.Option(help="Continue from the latest checkpoint in --server-checkpoint.")
]
Logs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write what each worker and server prints to a file of its own there: rank-0.log, "
        "server-0.log …",
    ),
]
ScriptArgs = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", metavar="-- ARGS")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses become one option for each field."""
    bags: dict[str, Any] = {}
    shown = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            shown.append(parameter.replace(annotation=hints[name]))
            continue
        bags[name] = hints[name]
        types = get_type_hints(hints[name], include_extras=True)
        shown += [
            parameter.replace(
                name=field.name,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=types[field.name],
            )
            for field in fields(hints[name])
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, bag in bags.items():
            values[name] = bag(**{field.name: values.pop(field.name) for field in fields(bag)})
        command(**values)

    shown.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    vars(run)["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run
