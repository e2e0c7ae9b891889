"""The command line. Exit status: 0 for success, 1 for a failed check or run, 2 for bad input."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from shoal import __version__
from shoal.commands.options import with_options
from shoal.errors import BadInput, ShoalError, WorkersFailed
from shoal.runtime.wording import printable, say

# the usage error of click, which newer versions of typer include
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
_ITS_WORDS = {  # of pydantic
    "Input should be greater than or equal to": "it has to be at least",
    "Input should be less than or equal to": "it has to be at most",
    "Input should be a valid integer, unable to parse string as an integer": "it has to be a whole "
    "number",
    "Input should be a valid number, unable to parse string as a number": "it has to be a number",
}

# by name, in the order of the help: a module of shoal/commands/, and its function or Typer. Only
# the module of the command that is given is loaded: all of them take half a second.
COMMANDS = {
    "run": "run.run",
    "join": "runs.join",
    "ps": "runs.ps",
    "stop": "runs.stop",
    "submit": "submit.submit",
    "train": "run.train",
    "eval": "run.evaluate",
    "timeline": "timeline.timeline",
    "verify": "verify.verify",
    "memory": "memory.memory",
    "explain": "explain.explain",
    "compare": "compare.compare",
    "scale": "scale.scale",
    "rehearse": "rehearse.rehearse",
    "report": "report.report",
    "predict": "predict.predict",
    "plan": "plan.plan",
    "cluster": "cluster.app",
    "collectives": "collectives.app",
    "graphs": "graphs.graphs",
    "keys": "keys.app",
    "lab": "lab.app",
    "pipeline": "pipeline.app",
}


class _Group(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Sentences whole, which click cuts to a line."""
        rows = [(name, one.get_short_help_str(1000)) for name, one in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def new_app(about: str) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=about,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def build_app(names: Iterable[str], listed: Iterable[str] = ()) -> typer.Typer:
    """The command line with these commands; those that are `listed` have a help line alone."""
    app = new_app("Train one PyTorch model on many devices; the strategy is a value that you swap.")
    app.callback(invoke_without_command=True)(about)
    for name in listed:
        app.command(name, help=_help_line(*COMMANDS[name].split(".")))(lambda: None)
    for name in names:
        module, attribute = COMMANDS[name].split(".")
        command = getattr(import_module(f"shoal.commands.{module}"), attribute)
        if isinstance(command, typer.Typer):
            for one in (*command.registered_commands, command.registered_callback):
                if one is not None and one.callback is not None:
                    one.callback = with_options(one.callback)
            app.add_typer(command, name=name, cls=_Group)
        else:
            command = with_options(command)
            app.command(name, cls=_command_class(command))(command)
    return app


def _help_line(module: str, attribute: str) -> str | None:
    """What a module says of its function or Typer, without loading it."""
    source = Path(__file__).with_name(f"{module}.py")
    told = rf'^(def {attribute}\(.*?"""|{attribute} = typer.Typer\(\s*help=")(.+?)("""|"|\n\n)'
    found = re.search(told, source.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return found and found[2]


def _command_class(command: Callable[..., None]) -> type[TyperCommand] | None:
    """One that leaves what stands behind a script to the script."""
    if "args" not in inspect.signature(command).parameters:
        return None
    from shoal.commands.script_words import ScriptCommand  # only where it is needed

    return ScriptCommand


def about(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"shoal {__version__}")
        raise typer.Exit


_INTERRUPTED = 130  # what a command returns after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    first = next((word for word in words if word != "--"), "")
    if first == "simulate":
        say("there is no shoal simulate: use shoal predict, or shoal rehearse --no-train")
        sys.exit(2)
    app = build_app([first]) if first in COMMANDS else build_app((), COMMANDS)
    run_app(app, "shoal", words)


def run_app(app: typer.Typer, name: str, words: Sequence[str] | None = None) -> None:
    """Run a command; an error of Shoal is printed as one sentence."""
    try:
        status = app(words, prog_name=name, standalone_mode=False)
        sys.exit(_interrupted() if status == _INTERRUPTED else status)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except _UsageError as error:
        print(printable(_usage_message(error)), file=sys.stderr)
        sys.exit(2)
    except ShoalError as error:
        if isinstance(error, WorkersFailed):  # with what the script has printed, colors and all
            print(f"shoal: {error}", file=sys.stderr)
        else:
            say(str(error))
        # the argument parser of a script exits with 2
        bad_script = isinstance(error, WorkersFailed) and error.exit_status == 2
        sys.exit(2 if bad_script or isinstance(error, BadInput) else 1)


def _interrupted() -> int:
    print("shoal: interrupted", file=sys.stderr)
    return _INTERRUPTED


def _usage_message(error: typer.BadParameter) -> str:
    message = error.format_message()
    if error.ctx is not None and message.startswith("No such option: --json"):
        if error.ctx.command_path in ("shoal run", "shoal train"):
            message = "No such option: --json; --report FILE writes the report of the run as JSON"
    elif error.ctx is not None and message.startswith("No such option"):
        has_script = any(parameter.name == "args" for parameter in error.ctx.command.params)
        message += "; options of the script stand behind it" if has_script else ""
    if "\n" in message:  # a command without arguments prints its help
        return message
    message = message.rstrip(".")
    for its, ours in _ITS_WORDS.items():
        message = message.replace(its, ours)
    return f"shoal: {message}" + (f" (see {error.ctx.command_path} --help)" if error.ctx else "")
