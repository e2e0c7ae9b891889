"""What a command runs: an example by name, or the user's script; and how it is shown."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import BadInput
from shoal.launch.local import launch
from shoal.observe.progress import Bar
from shoal.strategy import Ddp, Strategy, as_strategy, require_built

EXAMPLES = ("digits", "gpt", "clicks")

Workers = Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of workers.")]
StrategyText = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help='How the work is divided, such as "ddp(bucket_mb=4)".',
        show_default="ddp, or single for one worker",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, order of samples and dropout.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is one")
]
Gpus = Annotated[str | None, typer.Option(help="The GPUs to use, such as 0,1.")]
Trace = Annotated[
    Path | None, typer.Option(help="Write a Chrome trace here, and print where the time went.")
]
ScriptArgs = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", metavar="-- ARGS")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def command_for(target: str, args: Sequence[str] | None) -> list[str]:
    """The command that runs an example or a script in a worker."""
    if target in EXAMPLES and not Path(target).exists():
        return [sys.executable, "-m", f"shoal.examples.{target}", *(args or [])]
    if not Path(target).is_file():
        near = difflib.get_close_matches(target, EXAMPLES, 1)
        hint = f"; did you mean the example {near[0]!r}?" if near else ""
        raise BadInput(f"there is no script {target!r} here{hint}")
    return [sys.executable, target, *(args or [])]


def strategy_for(text: str | None, workers: int) -> Strategy:
    """The strategy, checked against the number of workers before anything starts."""
    strategy = as_strategy(text if text is not None else ("ddp" if workers > 1 else "single"))
    strategy.layout(workers)
    require_built(strategy)
    if isinstance(strategy.sync, Ddp) and strategy.sync.algorithm != "auto":
        from shoal.schedules.catalog import build  # numpy: only where it is needed

        build("all_reduce", strategy.sync.algorithm, 1)  # refuses an unknown name
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


def run_shown(command: Sequence[str], workers: int, env: Mapping[str, str]) -> None:
    """Run workers with a live bar on a terminal, and with plain lines elsewhere."""
    try:
        _run_shown(command, workers, env)
    except KeyboardInterrupt:
        print("shoal: interrupted; all workers have ended", file=sys.stderr)
        raise


def _run_shown(command: Sequence[str], workers: int, env: Mapping[str, str]) -> None:
    if not sys.stdout.isatty():
        launch(command, workers, env=env)
        return
    bar = Bar()
    try:
        launch(command, workers, env=env, write=bar.print, on_progress=bar.show)
    finally:
        bar.close()


def run_quietly(command: Sequence[str], workers: int, env: Mapping[str, str]) -> None:
    """Run workers without a word; a failure still tells what it has to tell."""
    launch(command, workers, env=env, write=lambda text, is_stderr: None)


@contextmanager
def traced(env: dict[str, str], file: Path | None) -> Iterator[None]:
    """Collect the spans of all workers into `file` and print where the time went."""
    if file is None:
        yield
        return
    if not file.parent.is_dir():
        raise BadInput(f"cannot write a trace to {file}: there is no folder {file.parent}")
    with tempfile.TemporaryDirectory(prefix="shoal-trace-") as folder:
        env["SHOAL_TRACE_DIR"] = folder
        yield
        from shoal.observe.report import print_shares, write_chrome
        from shoal.observe.trace import read

        spans = read(Path(folder))
        write_chrome(spans, file)
        print_shares(spans)
        print(f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)")
