"""`shoal join`: one worker more for a run that goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.launch.joining import ask_to_join, wait_for_answer
from shoal.launch.running import run_name


def join(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A name that `shoal ps` shows.", show_default="the only run that takes a worker"
        ),
    ] = None,
) -> None:
    """Ask a run on this host to start a worker that is not there, up to its number (-n)."""
    run_dir, request = ask_to_join(run)
    name = run_name(run_dir)
    said = wait_for_answer(run_dir, request)
    print(f"{said}, in the run {name}; its launcher says what follows")
