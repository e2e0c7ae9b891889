"""Arguments and options that several commands share, with their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from shoal.errors import BadInput


def option(help: str, default: Any = None, *names: str, **more: Any) -> Any:
    """The default of a parameter, or of a field, that is an option; `...` for one that is needed.

    `more` is for `typer.Option`. One that dataclasses share has one name in all of them.
    """
    return _told(default, typer.Option(*names, help=help, **more))


def argument(help: str, default: Any = None, **more: Any) -> Any:
    """The same of an argument."""
    return _told(default, typer.Argument(help=help, **more))


def _told(default: Any, how: Any) -> Any:
    return field(default=MISSING if default is ... else default, metadata={"how": how})


Script = Annotated[str, typer.Argument(help="A script that calls shoal.run, or an example.")]
Workers = Annotated[
    int, typer.Option("--workers", "-n", min=1, max=10_000_000, help="Number of workers.")
]
RUN_WORKERS = option("Number of workers.", None, "--workers", "-n", min=1, show_default="1")
ON = option(
    "Run on hosts that an engine lends: lab or lab://NAME (see shoal lab), ray or ray://HOST:PORT.",
    metavar="ENGINE",
    show_default="this host",
)
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help='How to train on the workers, such as "ddp(bucket_mb=4)"; run and train take auto.',
        show_default="ddp, or single for one worker",
    ),
]
SEED = option("Seed of weights, order of samples and dropout.", show_default="0")
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is one")
]
TRACE = option("Write a Chrome trace here, and print where the time went.")
SLOW = option(
    "Slow a worker or server down: 1:4x makes worker 1 four times slower, "
    "server:1:4x server 1; repeatable."
)
KILL = option(
    "Kill a worker or server: 2@50 kills worker 2 at step 50, server:1@50 server 1; repeatable."
)
RESTART = option(
    "Start workers that were killed again, so many times in all: they take their place "
    "among the others at the present step (ddp, zero, localsgd, gossip with elastic=True, ps, "
    "asynchronous gossip, hogwild). Servers with replicas are started again as often, each. "
    "With 0 no process is. With --on: start all workers again.",
    min=0,
    max=30_000,
    show_default="no worker, each server 3 times",
)
UNTIL = option("Seconds and steps until the loss is so low.", metavar="loss=NUMBER")
WorkerNumbers = Annotated[
    str, typer.Option("--workers", "-n", metavar="INTEGERS", help="Such as 4; 1,2,4; 1,2,…,1024.")
]
CHECKPOINT = option(
    "Save in DIR every 100 steps of the optimizer, or as many as given, and when the run is "
    "preempted; "
    "continue from what is there.",
    metavar="DIR[:every=STEPS]",
)
SCRIPT_ARGS = argument(
    "What stands behind the script goes to it unchanged; options of this command stand before.",
    metavar="ARGS",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_counts(option: str, text: str, most: int = 4096) -> list[int]:
    """Each number once; `…` or `...` goes on as the two before it: 2,4,…,1024."""
    words = [word.strip() for word in text.replace("...", "…").split(",")]
    found: list[int] = []
    for number, word in enumerate(words):
        if word == "…" and len(found) > 1 and words[number + 1 : number + 2] != []:
            (before, last), end = found[-2:], words[number + 1]
            factor = last // before if last % before == 0 else 1
            step = last - before
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


def help_of(one: Field[Any]) -> str:
    return str(one.metadata["how"].help) if one.metadata else ""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it: options in its types, and dataclasses field by field."""
    bags: dict[str, Any] = {}
    shown = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            shown.append(_shown(name, hints[name], parameter.default))
            continue
        bags[name] = hints[name]
        types = get_type_hints(hints[name], include_extras=True)
        shown += [_shown(one.name, types[one.name], one) for one in fields(hints[name])]
    shown.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    signature = inspect.Signature(shown)

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        values = bound.arguments
        for name, bag in bags.items():
            values[name] = bag(**{one.name: values.pop(one.name) for one in fields(bag)})
        command(**values)

    vars(run)["__signature__"] = signature
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _shown(name: str, kind: Any, default: Any) -> inspect.Parameter:
    if isinstance(default, Field):
        kind = Annotated[kind, default.metadata["how"]] if default.metadata else kind
        default = inspect.Parameter.empty if default.default is MISSING else default.default
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, either, default=default, annotation=kind)
