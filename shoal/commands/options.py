"""Arguments and options that several commands share, with their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from shoal.errors import BadInput

Script = Annotated[str, typer.Argument(help="A script that calls shoal.run, or an example.")]
Workers = Annotated[
    int, typer.Option("--workers", "-n", min=1, max=10_000_000, help="Number of workers.")
]
RunWorkers = Annotated[
    int | None, typer.Option("--workers", "-n", min=1, help="Number of workers.", show_default="1")
]
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
        "summed up inside racks first.",
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
Gpus = Annotated[
    str | None,
    typer.Option(help="The GPUs to use, such as 0,1; implies --device cuda.", show_default="all"),
]
Trace = Annotated[
    Path | None, typer.Option(help="Write a Chrome trace here, and print where the time went.")
]
Jsonl = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a JSON line for every step, job.log, evaluation, checkpoint and lost worker.",
    ),
]
Tensorboard = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write the losses and metrics for TensorBoard there."),
]
RunTimeline = Annotated[
    bool,
    typer.Option(
        "--timeline", help="Draw two steps at the end: what each worker and server did when."
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain", help="Print lines also in a terminal: no progress bar, no table of workers."
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        help="Slow a worker or server down: 1:4x makes worker 1 four times slower, "
        "server:1:4x server 1; repeatable."
    ),
]
Kill = Annotated[
    list[str] | None,
    typer.Option(
        help="Kill a worker or server: 2@50 kills worker 2 at step 50, server:1@50 server 1; "
        "repeatable."
    ),
]
Restart = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=30_000,
        help="Start workers that were killed again, so many times in all: they take their place "
        "among the others at the present step (ddp, zero, localsgd, gossip with elastic=True, ps, "
        "asynchronous gossip, hogwild). Servers with replicas are started again as often, each. "
        "With 0 no process is. With --on: start all workers again.",
        show_default="no worker, each server 3 times",
    ),
]
Start = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Start so many of the workers now; `shoal join` starts the others, one at a time.",
        show_default="all",
    ),
]
StartMethod = Annotated[
    Literal["fork", "spawn"] | None,
    typer.Option(
        help="How workers of this host start: as forks of one process that has imported torch for "
        "all of them, or each as a new Python process.",
        show_default="fork",
    ),
]
Elastic = Annotated[
    str | None,
    typer.Option(
        metavar="MIN:MAX",
        help="Let workers leave (crash, preemption) and join (--restart, `shoal join`) between two "
        "steps, up to MAX; with fewer than MIN the run ends. -n or --start says how many there are "
        "at first (default: MAX). Makes ddp ddp(elastic=True); so zero, localsgd, gossip. "
        "Relaxed ps, hogwild and asynchronous gossip stay as they are, on this host.",
        show_default=False,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(metavar="loss=NUMBER", help="Seconds and steps until the loss is so low."),
]
WorkerNumbers = Annotated[
    str, typer.Option("--workers", "-n", metavar="INTEGERS", help="Such as 4; 1,2,4; 1,2,…,1024.")
]
ServerCheckpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR[:every=STEPS]",
        help="Let the servers of ps save what they hold in DIR, every 100 steps or as many as "
        "given, beside training; the last two stay.",
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
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Give up after so many seconds without a sign of a worker or server that is waited "
        "for.",
        show_default="1800; without end for servers",
    ),
]
Grace = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Seconds that workers have after SIGTERM to end a step and to save.",
        show_default="30",
    ),
]
Report = Annotated[
    Path | None, typer.Option(help="Write a JSON report here when the run has succeeded.")
]
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write what `shoal report DIR` makes a page of: trace.json, as --trace does, and "
        "report.json, as --report does, with the loss of every step.",
    ),
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
    list[str] | None,
    typer.Argument(
        help="What is no option of this command goes to the script, and all that is behind --.",
        metavar="[--] ARGS",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_counts(option: str, text: str, most: int = 4096) -> list[int]:
    """Each number once; `…` or `...` goes on as the two before it: 2,4,…,1024."""
    words = [word.strip() for word in text.replace("...", "…").split(",")]
    found: list[int] = []
    for number, word in enumerate(words):
        if word == "…" and len(found) > 1 and words[number + 1 : number + 2] != []:
            (before, last), end = found[-2:], words[number + 1]
            factor, step = (last // before if last % before == 0 else 1), last - before
            while step > 0 and end.isdigit():
                last = last * factor if factor > 1 else last + step
                if last >= min(int(end[:9]), most):
                    break
                found.append(last)
        elif word.isdigit() and 1 <= int(word[:9]) <= most:
            found.append(int(word))
        else:
            raise BadInput(
                f"{option} takes numbers from 1 to {most:,}, such as 2,4,8 or 2,4,…,64, "
                f"not {text[:40]!r}"
            )
    return list(dict.fromkeys(found))


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
