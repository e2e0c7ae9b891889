"""What a command runs: an example by name, or the user's script; and how it is shown."""

from __future__ import annotations

import difflib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import BadInput
from shoal.launch.local import Ending, launch
from shoal.launch.lost_workers import tolerance_of
from shoal.launch.output import OnProgress, Write, print_lines
from shoal.launch.report import account
from shoal.observe.progress import Bar
from shoal.runtime.faults import fault_variables
from shoal.schedules.user import is_user_function
from shoal.strategy.strategy import Strategy, as_strategy

EXAMPLES = ("digits", "gpt", "clicks")


def command_for(target: str, args: Sequence[str] | None) -> list[str]:
    """The command that runs an example or a script in a worker."""
    if target in EXAMPLES and not Path(target).exists():
        return [sys.executable, "-m", f"shoal.examples.{target}", *(args or [])]
    if not Path(target).is_file():
        near = difflib.get_close_matches(target, EXAMPLES, 1)
        hint = f"; did you mean the example {near[0]!r}?" if near else ""
        raise BadInput(f"there is no script {target!r} here{hint}")
    return [sys.executable, target, *(args or [])]


def strategy_for(text: str | None, workers: int, to_run: bool = True) -> Strategy:
    """The strategy, checked against the number of workers before anything starts."""
    strategy = as_strategy(text if text is not None else ("ddp" if workers > 1 else "single"))
    strategy.layout(workers)
    if to_run:
        strategy.require_built()
    algorithm = strategy.sync_for(workers).collective_algorithm
    if algorithm is not None and not is_user_function(algorithm):
        from shoal.schedules.collectives.catalog import build  # numpy: only where it is needed

        build("all_reduce", algorithm, 1)  # refuses an unknown name
    return strategy


def environment(
    strategy: Strategy, seed: int | None = None, device: str | None = None, gpus: str | None = None
) -> dict[str, str]:
    """What workers have to know, as variables."""
    env = {**os.environ, "SHOAL_STRATEGY": str(strategy)}
    if seed is not None:
        env["SHOAL_SEED"] = str(seed)
    if device is not None:
        env["SHOAL_DEVICE"] = device
    if gpus is not None:
        if not all(part.strip().isdigit() for part in gpus.split(",")):
            raise BadInput(f"--gpus takes numbers such as 0,1, not {gpus!r}")
        env["CUDA_VISIBLE_DEVICES"] = gpus
        env.setdefault("SHOAL_DEVICE", "cuda")
    return env


def add_faults(
    env: dict[str, str], slow: Sequence[str] | None, kill: Sequence[str] | None, workers: int
) -> None:
    """Tell the workers what trouble they are to make; refused here if it makes no sense."""
    env.update(fault_variables(slow or (), kill or (), workers))


def run_shown(
    command: Sequence[str], workers: int, env: Mapping[str, str], report: Path | None = None
) -> None:
    """Run workers with a live bar on a terminal, and with plain lines elsewhere.

    `env` is what `environment` has made: it names the strategy.
    """
    check_folder(report, "a report")
    try:
        ending = _run_shown(command, workers, env)
    except KeyboardInterrupt:
        print("shoal: interrupted; all workers have ended", file=sys.stderr)
        raise
    if report is not None:
        document = account(env["SHOAL_STRATEGY"], workers, ending)
        report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _run_shown(command: Sequence[str], workers: int, env: Mapping[str, str]) -> Ending:
    if not sys.stdout.isatty():
        return _launch(command, workers, env, print_lines)
    bar = Bar()
    try:
        return _launch(command, workers, env, bar.print, bar.show)
    finally:
        bar.close()


def check_trained(file: Path) -> None:
    """Refuse a script that has left no such file, which a training step does."""
    if not file.is_file():
        raise BadInput(
            "the script has ended without a training step: it has to call shoal.run(train), "
            "and train has to call the function that job.step returns"
        )


def run_quietly(command: Sequence[str], workers: int, env: Mapping[str, str]) -> None:
    """Run workers without a word; a failure still tells what it has to tell."""
    _launch(command, workers, env, lambda text, is_stderr: None)


def _launch(
    command: Sequence[str],
    workers: int,
    env: Mapping[str, str],
    write: Write,
    on_progress: OnProgress | None = None,
) -> Ending:
    strategy = as_strategy(env["SHOAL_STRATEGY"])
    return launch(
        command,
        workers,
        env=env,
        write=write,
        on_progress=on_progress,
        servers=strategy.servers(workers),
        tolerance=tolerance_of(strategy, workers),
    )


def check_folder(file: Path | None, what: str) -> None:
    """Refuse, before the run, a file that could not be written after it."""
    if file is not None and not file.parent.is_dir():
        raise BadInput(f"cannot write {what} to {file}: there is no folder {file.parent}")
    if file is not None and file.is_dir():
        raise BadInput(f"cannot write {what} to {file}: it is a folder")


@contextmanager
def traced(env: dict[str, str], file: Path | None) -> Iterator[None]:
    """Collect the spans of all workers into `file` and print where the time went."""
    if file is None:
        yield
        return
    check_folder(file, "a trace")
    with tempfile.TemporaryDirectory(prefix="shoal-trace-") as folder:
        env["SHOAL_TRACE_DIR"] = folder
        yield
        from shoal.observe.time_shares import print_shares, write_chrome
        from shoal.observe.trace import read

        spans = read(Path(folder))
        write_chrome(spans, file)
        print_shares(spans)
        print(f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)")
