"""`shoal join`: one worker more for a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.launch.joining import ask_to_join, wait_for_answer


def join(
    run: Annotated[
        Path | None,
        typer.Argument(help="The folder of the run.", show_default="the only run of this user"),
    ] = None,
) -> None:
    """Ask a run on this host to start a worker that is not there, up to its number (-n)."""
    run_dir, request = ask_to_join(run)
    said = wait_for_answer(run_dir, request)
    print(f"{said}, in the run of {run_dir.path}; its launcher says what follows")
