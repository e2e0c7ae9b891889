"""`shoal ps` and `shoal stop`: the runs of this user on this host."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import typer

from shoal.commands import options
from shoal.commands.options import argument, option
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput, CheckFailed
from shoal.launch.here import running


def ps(as_json: options.Json = False) -> None:
    """Show what runs: where, since when, at which step."""
    found = running.entries()
    if as_json:
        print(json.dumps([entry.document() for entry in found], indent=2))
        return
    if not found:
        print("no run of yours runs on this host")
        return
    heads = ["run", "script", "strategy", "workers", "on", "since", "step"]
    rows = [
        [
            *(entry.name, entry.script, entry.strategy),
            # 2, 2+1 with a server, 1 of 2+1 where a worker was lost or has not joined
            (f"{entry.present} of " if entry.present != entry.workers else "")
            + f"{entry.workers}{f'+{entry.servers}' if entry.servers else ''}",
            ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""),
            _since(time.time() - entry.started),
            "-" if entry.steps is None else str(entry.steps),
        ]
        for entry in found
        for hosts in [list(dict.fromkeys(entry.hosts))]
    ]
    wide_console().print(plain_table("", heads, rows, left=3))


def stop(
    run: str | None = argument("A name that `shoal ps` shows."),
    every: bool = option("All runs of yours on this host.", False, "--all"),
    yes: bool = option("With --all: do not ask.", False, "--yes", "-y"),
    now: bool = option("Do not let it end its step and save.", False, "--now"),
    timeout: float = option("Wait so many seconds at most.", 60.0, min=0.1),
) -> None:
    """Stop a run as preemption does: it ends its step, and saves where the script saves."""
    if (run is None) != every:
        raise BadInput("name a run that `shoal ps` shows, or give --all: one of both")
    chosen = [running.find_run(run)] if run is not None else running.entries()
    if not chosen:
        print("no run of yours runs on this host")
        return
    if every and not yes:
        _confirm([f"{entry.name} ({entry.script})" for entry in chosen])
    with ThreadPoolExecutor(len(chosen)) as pool:
        ended = list(pool.map(lambda entry: running.stop_run(entry, now, timeout), chosen))
    for has_ended, sentence in ended:
        if has_ended:
            print(sentence)
    left = [sentence for has_ended, sentence in ended if not has_ended]
    if left:
        raise CheckFailed("; ".join(left))


def _confirm(names: list[str]) -> None:
    """Ask whether to stop these runs; BadInput without a yes."""
    if not sys.stdin.isatty():
        raise BadInput(f"--all would stop {', '.join(names)}: add --yes where stdin is no terminal")
    if not typer.confirm(f"stop {', '.join(names)}?"):
        raise BadInput("nothing was stopped")


def _since(seconds: float) -> str:
    minutes, left = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"


def join(
    run: str | None = argument(
        "A name that `shoal ps` shows.", show_default="the only run that takes a worker"
    ),
) -> None:
    """Ask a run on this host to start a worker that is not there, up to its number (-n).

    Waits until the worker has joined; exit status 1 where it has not.
    """
    run_dir, request = running.ask_to_join(run)
    name = running.run_name(run_dir)
    worker = running.wait_for_answer(run_dir, request)
    waits = "waiting until it has joined; Ctrl-C ends only the waiting"
    print(f"shoal: {worker.sentence}; {waits}", file=sys.stderr, flush=True)
    running.wait_until_joined(run_dir, worker)
    print(f"worker {worker.rank} has joined the run {name}")
