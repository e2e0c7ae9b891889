"""`shoal join`: one worker more for a run that goes on."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.launch.joining import ask_to_join, wait_for_answer, wait_until_joined
from shoal.launch.running import run_name


def join(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A name that `shoal ps` shows.", show_default="the only run that takes a worker"
        ),
    ] = None,
) -> None:
    """Ask a run on this host to start a worker that is not there, up to its number (-n).

    Waits until the worker has joined; exit status 1 where it has not.
    """
    run_dir, request = ask_to_join(run)
    name = run_name(run_dir)
    worker = wait_for_answer(run_dir, request)
    waits = "waiting until it has joined; Ctrl-C ends only the waiting"
    print(f"shoal: {worker.sentence}; {waits}", file=sys.stderr, flush=True)
    wait_until_joined(run_dir, worker)
    print(f"worker {worker.rank} has joined the run {name}")
