"""From a script or example to a launch: command, configuration, and what is shown meanwhile."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.commands.engines import open_engine
from shoal.errors import BadInput
from shoal.launch.checkpoint_option import saying_latest, with_checkpoint, with_server_checkpoint
from shoal.launch.local import LaunchSpec, launch
from shoal.launch.lost_workers import taking_back, tolerance_of
from shoal.launch.output import OnProgress, Write, discard_lines, print_lines
from shoal.launch.process_config import replication_of
from shoal.launch.processes import Forks
from shoal.launch.report import RunResult, run_report
from shoal.observe.progress import ProgressBar
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import check_faults
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.schedules.user import is_user_function
from shoal.strategy.strategy import Strategy, as_strategy

EXAMPLES = ("digits", "gpt", "clicks")


@dataclass(frozen=True)
class WorkersOptions:
    """The options that `shoal run` and `shoal train` share."""

    workers: int
    strategy: str | None = None
    seed: int | None = None
    device: str | None = None
    gpus: str | None = None
    slow: Sequence[str] | None = None
    kill: Sequence[str] | None = None
    timeout_s: float | None = None
    grace_s: float | None = None
    restarts: int | None = None
    start: int | None = None
    server_checkpoint: str | None = None  # DIR or DIR:every=STEPS
    resume: bool = False
    on: str | None = None  # an engine: there --restart starts all workers again
    checkpoint: str | None = None  # DIR or DIR:every=STEPS
    at_least: int | None = None  # workers; with fewer the run ends

    def to_config(self) -> RunConfig:
        """The configuration of the workers; BadInput where an option makes no sense."""
        strategy = strategy_for(self.strategy, self.workers)
        config = config_for(strategy, self.seed, self.device, self.gpus)
        config = replace(
            config,
            slow=tuple(self.slow or config.slow),
            kill=tuple(self.kill or config.kill),
            grace_s=self.grace_s or config.grace_s,
            restarts=config.restarts if self.restarts is None else self.restarts,
            start=self.start or config.start,
            min_workers=self.at_least or config.min_workers,
            wait=replace(config.wait, limit_s=self.timeout_s or config.wait.limit_s),
        )
        servers = strategy.servers(self.workers)
        why_none = strategy.sync_for(self.workers).why_no_server_processes
        check_faults(config, self.workers, servers, why_none)
        if config.start is not None and config.start > self.workers:
            raise BadInput(
                f"--start {config.start} is more than the {counted(self.workers, 'worker')} of -n"
            )
        if self.on is not None and self.at_least is not None and not strategy.is_elastic:
            raise BadInput(
                f"--elastic with --on: workers of {strategy} leave and join on this host only; on "
                "other hosts those of ddp, zero, localsgd and gossip do"
            )
        takes_back = config.takes_back and (self.on is None or strategy.is_elastic)
        if takes_back:
            option = "--restart" if config.restarts else "--start"
            option = "--elastic" if self.at_least is not None else option
            strategy.taking_back(self.workers).require_takes_back(option)
        config = with_checkpoint(config, self.checkpoint)
        config = with_server_checkpoint(config, strategy, self.server_checkpoint, self.resume)
        if not takes_back:
            return config
        return replace(config, strategy=str(taking_back(strategy, self.workers)))


def elastic_options(
    options: WorkersOptions, text: str | None, workers: int | None = None
) -> WorkersOptions:
    """The options with `--elastic MIN:MAX`: MAX workers at most, of which -n are started.

    `workers` is the number of -n; None where it is not given. Beside --start it may also be MAX.
    """
    if text is None:
        return options
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(
            f"--elastic takes the fewest and the most workers, as 2:8, not {text[:40]!r}"
        )
    fewest, most = int(match[1]), int(match[2])
    start = options.start or workers or most
    if workers not in (None, start, most):
        raise BadInput(
            f"--elastic {text}: -n {workers} and --start {start} are two numbers of workers at "
            "first: leave out one of them"
        )
    if not fewest <= start <= most:
        raise BadInput(
            f"--elastic {text}: the run cannot start with {counted(start, 'worker')}: give -n from "
            f"{fewest} to {most}"
        )
    strategy = str(strategy_for(options.strategy or "ddp", most).as_elastic())
    return replace(options, workers=most, start=start, strategy=strategy, at_least=fewest)


def command_for(script: str, args: Sequence[str] | None) -> list[str]:
    """The command that runs an example or a script in a worker."""
    if script in EXAMPLES and not Path(script).exists():
        return [sys.executable, "-m", f"shoal.examples.{script}", *(args or [])]
    if not Path(script).is_file():
        near = difflib.get_close_matches(script, EXAMPLES, 1)
        hint = f"; did you mean the example {near[0]!r}?" if near else ""
        raise BadInput(f"there is no script {script!r} here{hint}")
    return [sys.executable, script, *(args or [])]


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


def resolve_auto(
    text: str | None, command: Sequence[str], workers: int, device: str | None
) -> str | None:
    """The strategy that `-s auto` stands for; any other text as it is."""
    if text != "auto":
        return text
    from shoal.launch.auto import choose_strategy  # only where it is needed

    config = config_for(as_strategy("single"), device=device)
    run = partial(run_quietly, command)
    return str(choose_strategy(workers, config, run, _say))


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)


def config_for(
    strategy: Strategy, seed: int | None = None, device: str | None = None, gpus: str | None = None
) -> RunConfig:
    """The configuration of this process, with what the options of a command change."""
    config = RunConfig.from_environment()
    config = replace(
        config,
        strategy=str(strategy),
        seed=config.seed if seed is None else seed,
        device=device or config.device,
    )
    if gpus is None:
        return config
    if not all(number.strip().isdigit() for number in gpus.split(",")):
        raise BadInput(f"--gpus takes numbers such as 0,1, not {gpus!r}")
    config = replace(config, device=config.device or "cuda")
    return config.with_environ(CUDA_VISIBLE_DEVICES=gpus)


def run_shown(
    command: Sequence[str],
    workers: int,
    config: RunConfig,
    report: Path | None = None,
    on: str | None = None,
    logs: Path | None = None,
) -> None:
    """Run workers with a live progress bar on a terminal, and with plain lines elsewhere.

    `on`: the engine whose hosts they are to run on. `logs`: a folder for what each one prints.
    """
    check_folder(report, "a report")
    try:
        with saying_latest(config.server_checkpoint.folder, _say):
            result = _run_shown(command, workers, config, on, logs)
    except KeyboardInterrupt:
        print("shoal: interrupted; all workers have exited", file=sys.stderr)
        sys.exit(130)
    if not result.has_trained:
        print(
            "shoal: the script never called shoal.run(train), so the strategy had no part in it",
            file=sys.stderr,
        )
    if report is not None:
        document = run_report(config.strategy or "", workers, result)
        report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _run_shown(
    command: Sequence[str], workers: int, config: RunConfig, on: str | None, logs: Path | None
) -> RunResult:
    spec = LaunchSpec(command, workers, config, logs=logs, shows_name=sys.stderr.isatty())
    if not sys.stdout.isatty():
        return _launch(spec, print_lines, on=on)
    bar = ProgressBar()
    try:
        return _launch(spec, bar.print, bar.show, on=on)
    finally:
        bar.close()


def check_trained(file: Path) -> None:
    """Refuse a script without this file, which is written when it has made a training step."""
    if not file.is_file():
        raise BadInput(
            "the script has ended without a training step: it has to call shoal.run(train), "
            "and train has to call the function that job.step returns, and to return"
        )


def run_quietly(
    command: Sequence[str],
    workers: int,
    config: RunConfig,
    forks: Forks | None = None,
    on: str | None = None,
) -> None:
    """Run workers without showing their output; a failure is raised with its report."""
    _launch(LaunchSpec(command, workers, config, forks=forks), discard_lines, on=on)


def _launch(
    spec: LaunchSpec,
    write: Write,
    on_progress: OnProgress | None = None,
    on: str | None = None,
) -> RunResult:
    strategy = as_strategy(spec.config.strategy or "single")
    servers = strategy.servers(spec.workers)
    replication = replication_of(strategy, spec.workers, spec.config.restarts)
    spec = replace(spec, servers=servers, replication=replication)
    workers, config = spec.workers, spec.config
    if on is None or strategy.is_elastic:  # elsewhere all workers are started again together
        losses = (config.restarts, config.start, config.min_workers)
        spec = replace(spec, tolerance=tolerance_of(strategy, workers, *losses))
    if on is not None:
        from shoal.launch.remote import run_attempts  # only where it is needed

        with open_engine(on, spec.config) as machines:
            return run_attempts(machines, spec, write, on_progress)
    return launch(spec, write, on_progress)


def check_folder(file: Path | None, what: str) -> None:
    """Refuse, before the run, a file that could not be written after it."""
    if file is not None and not file.parent.is_dir():
        raise BadInput(f"cannot write {what} to {file}: there is no folder {file.parent}")
    if file is not None and file.is_dir():
        raise BadInput(f"cannot write {what} to {file}: it is a folder")


@contextmanager
def traced(config: RunConfig, file: Path | None) -> Iterator[RunConfig]:
    """Collect the spans of all workers into `file`, and print how the time was spent.

    Yields the configuration for workers that are traced.
    """
    if file is None:
        yield config
        return
    check_folder(file, "a trace")
    with scratch_folder("trace") as folder:
        yield replace(config, trace_dir=folder)
        from shoal.observe.time_shares import print_shares, write_chrome
        from shoal.observe.trace import read_spans

        spans = read_spans(folder)
        write_chrome(spans, file)
        print_shares(spans)
        print(f"trace: {file} (open it in chrome://tracing or ui.perfetto.dev)")
