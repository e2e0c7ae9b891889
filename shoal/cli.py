"""The command line. Exit status: 0 for success, 1 for a failed check or run, 2 for bad input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer

from shoal import __version__
from shoal.commands import bench, cluster, collectives, keys, lab, pipeline, trace
from shoal.commands.compare import compare
from shoal.commands.default_group import DEFAULT, DefaultGroup
from shoal.commands.join import join
from shoal.commands.memory import memory
from shoal.commands.msccl import export, import_file
from shoal.commands.plan import plan
from shoal.commands.plan_validate import validate
from shoal.commands.predict import predict
from shoal.commands.run import run
from shoal.commands.runs import ps, stop
from shoal.commands.simulate import simulate
from shoal.commands.submit import submit
from shoal.commands.train import evaluate, train
from shoal.commands.verify import verify
from shoal.errors import BadInput, ShoalError, WorkersFailed

# the usage error of click, which newer versions of typer include
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

app = typer.Typer(
    name="shoal",
    help="Train one PyTorch model on many devices; the strategy is a value that you swap.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(join)
app.command()(ps)
app.command()(stop)
app.command()(submit)
app.command()(train)
app.command("eval")(evaluate)
app.command()(verify)
app.command()(memory)
app.command()(compare)
collectives.app.command()(export)
collectives.app.command("import")(import_file)
app.command()(predict)
app.command()(simulate)
plans = typer.Typer(cls=DefaultGroup, help="Find the fastest strategies for a model on a cluster.")
plans.command(DEFAULT)(plan)
plans.command("validate")(validate)
app.add_typer(plans, name="plan")
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(collectives.app, name="collectives")
app.add_typer(keys.app, name="keys")
app.add_typer(lab.app, name="lab")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(trace.app, name="trace")


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"shoal {__version__}")
        raise typer.Exit


_INTERRUPTED = 130  # what a command returns after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error of Shoal is printed as one sentence."""
    try:
        status = app(arguments, prog_name="shoal", standalone_mode=False)
        if status == _INTERRUPTED:
            print("shoal: interrupted", file=sys.stderr)
        sys.exit(status)
    except _UsageError as error:
        print(_usage_message(error), file=sys.stderr)
        sys.exit(2)
    except BadInput as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        # the argument parser of a script exits with 2
        sys.exit(2 if isinstance(error, WorkersFailed) and error.exit_status == 2 else 1)


def _usage_message(error: typer.BadParameter) -> str:
    message = error.format_message()
    if "\n" in message or error.ctx is None:  # a command without arguments prints its help
        return message
    return f"shoal: {message.rstrip('.')} (see {error.ctx.command_path} --help)"


if __name__ == "__main__":
    main()
