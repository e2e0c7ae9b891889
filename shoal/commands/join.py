"""`shoal join`: one worker more for a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.launch.joining import ask_to_join


def join(
    run: Annotated[
        Path | None,
        typer.Argument(help="The folder of the run.", show_default="the only run of this user"),
    ] = None,
) -> None:
    """Ask a run on this host to start a worker that is not there, up to its number (-n)."""
    run_dir = ask_to_join(run)
    print(f"asked the run in {run_dir.path} to start a worker; its launcher says what follows")
