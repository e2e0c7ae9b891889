"""From a script or example to a launch: command, configuration, and what is shown meanwhile."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shoal.commands import options
from shoal.commands.options import option
from shoal.errors import BadInput
from shoal.launch.here.checkpoint_option import (
    saying_latest,
    with_checkpoint,
    with_server_checkpoint,
)
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.output import OnProgress, Write, discard_lines, print_lines
from shoal.launch.here.process_config import replication_of
from shoal.launch.here.template import Template
from shoal.launch.hosts.machines import Machines
from shoal.launch.losses.lost_workers import RunResult, run_report, taking_back, tolerance_of
from shoal.runtime.config import RunConfig, set_default_variables
from shoal.runtime.faults import check_faults
from shoal.runtime.files import scratch_folder
from shoal.runtime.preemption import NO_GRACE_S
from shoal.runtime.run_dir import RECORDED_REPORT, RECORDED_TRACE
from shoal.runtime.wording import counted, nearest, say
from shoal.schedules.user import is_user_function
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.train.progress import Progress

ENGINES = ("lab", "ray")


def check_engine(text: str) -> None:
    """BadInput where there is no such engine."""
    name, mark, address = text.partition("://")
    if name in ENGINES and (address or not mark):
        return
    if name in ENGINES:
        raise BadInput(f"--on {text} lacks what comes after ://; --on {name} takes the default")
    raise BadInput(f"--on takes {' or '.join(ENGINES)}, not {text!r}; {nearest(name, ENGINES)}")


def open_engine(text: str, config: RunConfig) -> Machines:
    """The hosts of an engine, as a block; each engine is loaded only where it is used."""
    check_engine(text)
    name, _, address = text.partition("://")
    if name == "lab":
        from shoal.launch.lab.lab import LabMachines

        return LabMachines(address or None)
    # Ray reads them when it is imported
    set_default_variables(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0")
    from shoal.launch.managers.ray_machines import RayMachines

    return RayMachines(address, config)


EXAMPLES = ("digits", "gpt", "clicks")
WORKER_COMMAND = (sys.executable, "-m", "shoal.commands.script_worker")


@dataclass(frozen=True)
class RunFiles:
    """What a run writes when it has ended; `more` is in its report."""

    traces: tuple[Path, ...] = ()
    reports: tuple[Path, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkersOptions:
    """The options that `shoal run` and `shoal train` share."""

    workers: int | None = options.RUN_WORKERS
    strategy: options.Strategy = None
    seed: int | None = options.SEED
    device: options.Device = None
    gpus: str | None = option(
        "The GPUs to use, such as 0,1; implies --device cuda.", show_default="all"
    )
    trace: Path | None = options.TRACE
    jsonl: Path | None = option(
        "Write a JSON line for every step, job.log, evaluation, checkpoint and lost worker.",
        metavar="FILE",
    )
    tensorboard: Path | None = option(
        "Write the losses and metrics for TensorBoard there.", metavar="DIR"
    )
    timeline: bool = option(
        "Draw two steps at the end: what each worker and server did when.", False, "--timeline"
    )
    slow: list[str] | None = options.SLOW
    kill: list[str] | None = options.KILL
    timeout: float | None = option(
        "Give up after so many seconds without a sign of a worker or server that is waited for.",
        min=0.001,
        show_default="1800; without end for servers",
    )
    grace: float | None = option(
        "Seconds that workers have after SIGTERM to end a step and to save.",
        min=0.001,
        show_default="30",
    )
    report: Path | None = option("Write a JSON report here when the run has succeeded.")
    record: Path | None = option(
        "Write what `shoal report DIR` makes a page of: trace.json, as --trace does, and "
        "report.json, as --report does, with the loss of every step.",
        metavar="DIR",
    )
    plain: bool = option(
        "Print lines also in a terminal: no progress bar, no table of workers.", False, "--plain"
    )
    restart: int | None = options.RESTART
    start: int | None = option(
        "Start so many of the workers now; `shoal join` starts the others, one at a time.",
        min=1,
        show_default="all",
    )
    start_method: Literal["fork", "spawn"] | None = option(
        "How workers of this host start: as forks of one process that has imported torch for "
        "all of them, or each as a new Python process.",
        show_default="fork",
    )
    elastic: str | None = option(
        "Let workers leave (crash, preemption) and join (--restart, `shoal join`) between two "
        "steps, up to MAX; with fewer than MIN the run ends. -n or --start says how many there are "
        "at first (default: MAX). Makes ddp ddp(elastic=True); so zero, localsgd, gossip. "
        "Relaxed ps, hogwild and asynchronous gossip stay as they are, on this host.",
        metavar="MIN:MAX",
        show_default=False,
    )
    server_checkpoint: str | None = option(
        "Let the servers of ps save what they hold in DIR, every 100 steps or as many as "
        "given, beside training; the last two stay.",
        metavar="DIR[:every=STEPS]",
    )

    @property
    def files(self) -> RunFiles:
        """Where the trace and the report go; BadInput where they could not be written."""
        folder = self.record
        found = []
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot record in {folder}: {error.strerror}") from error
        for given, name, what in (
            (self.trace, RECORDED_TRACE, "a trace"),
            (self.report, RECORDED_REPORT, "a report"),
        ):
            files = tuple(file for file in (given, folder and folder / name) if file is not None)
            for file in files:
                check_folder(file, what)
            found.append(files)
        return RunFiles(found[0], found[1])

    def resolved(self, command: Sequence[str]) -> WorkersOptions:
        """With the strategy that `-s auto` stands for, and the workers of --elastic."""
        if self.strategy != "auto":
            return self.as_elastic()
        from shoal.worker.auto import choose_strategy  # only where it is needed

        config = config_for(as_strategy("single"), device=self.device)
        run = partial(run_quietly, command)
        chosen = choose_strategy(self.workers or 1, config, run, say)
        return replace(self, strategy=str(chosen)).as_elastic()

    def as_elastic(self) -> WorkersOptions:
        """With `--elastic MIN:MAX`: MAX workers at most, of which -n or --start are started."""
        if self.elastic is None:
            return self
        match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", self.elastic)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise BadInput(
                "--elastic takes the fewest and the most workers, as 2:8, not "
                f"{self.elastic[:40]!r}"
            )
        fewest = int(match[1])
        most = int(match[2])
        start = self.start or self.workers or most
        if self.workers not in (None, start, most):
            raise BadInput(
                f"--elastic {self.elastic}: -n {self.workers} and --start {start} are two numbers "
                "of workers at first: leave out one of them"
            )
        if not fewest <= start <= most:
            raise BadInput(
                f"--elastic {self.elastic}: the run cannot start with "
                f"{counted(start, 'worker')}: give -n from {fewest} to {most}"
            )
        strategy = str(strategy_for(self.strategy or "ddp", most).as_elastic())
        return replace(self, workers=most, start=start, strategy=strategy)

    def to_config(
        self, on: str | None = None, checkpoint: str | None = None, resume: bool = False
    ) -> RunConfig:
        """The configuration of the workers; BadInput where an option makes no sense."""
        workers = self.workers or 1
        strategy = strategy_for(self.strategy, workers)
        config = config_for(strategy, self.seed, self.device, self.gpus)
        config = replace(
            config,
            slow=tuple(self.slow or config.slow),
            kill=tuple(self.kill or config.kill),
            grace_s=self.grace or config.grace_s,
            restarts=config.restarts if self.restart is None else self.restart,
            start=self.start or config.start,
            start_method=self.start_method or config.start_method,
            min_workers=int((self.elastic or "0").partition(":")[0]) or config.min_workers,
            wait=replace(config.wait, limit_s=self.timeout or config.wait.limit_s),
            jsonl=_emptied(self.jsonl) or config.jsonl,
            tensorboard=self.tensorboard.absolute() if self.tensorboard else config.tensorboard,
        )
        why_none = strategy.sync_for(workers).why_no_server_processes
        check_faults(config, workers, strategy.servers(workers), why_none)
        if config.start is not None and config.start > workers:
            raise BadInput(
                f"--start {config.start} is more than the {counted(workers, 'worker')} of -n"
            )
        if on is not None and self.elastic is not None and not strategy.is_elastic:
            raise BadInput(
                f"--elastic with --on: workers of {strategy} leave and join on this host only; on "
                "other hosts those of ddp, zero, localsgd and gossip do"
            )
        takes_back = config.takes_back and (on is None or strategy.is_elastic)
        if takes_back:
            option = "--elastic" if self.elastic else "--restart" if config.restarts else "--start"
            strategy.taking_back(workers).require_takes_back(option)
        config = with_checkpoint(config, checkpoint)
        config = with_server_checkpoint(config, strategy, self.server_checkpoint, resume)
        back = taking_back(strategy, workers) if takes_back else strategy
        return replace(config, strategy=str(back))


def _emptied(file: Path | None) -> Path | None:
    """The file of --jsonl, without the lines of an earlier run."""
    if file is None:
        return None
    check_folder(file, "the lines of --jsonl")
    try:
        file.write_text("")
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror}") from error
    return file.absolute()


def command_for(script: str, args: Sequence[str] | None) -> list[str]:
    """The command that runs an example or a script in a worker."""
    if script in EXAMPLES and not Path(script).exists():
        return [sys.executable, "-m", f"shoal.commands.examples.{script}", *(args or [])]
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
    files: RunFiles | None = None,
    on: str | None = None,
    logs: Path | None = None,
    plain: bool = False,
) -> None:
    """Run workers with a bar and a table on a terminal, and with plain lines elsewhere."""
    spec = LaunchSpec(command, workers, config, logs=logs, shows_name=sys.stderr.isatty())
    bar = None
    if sys.stdout.isatty() and not plain:
        from shoal.commands.live_view import WorkersView  # only where it is needed

        bar = WorkersView(workers, config.start)
    write, on_progress = (print_lines, None) if bar is None else (bar.print, bar.show)
    try:
        with saying_latest(config.server_checkpoint.folder, say), closing(bar or Progress()):
            result = _launch(spec, write, on_progress, on=on)
    except KeyboardInterrupt:
        print("shoal: interrupted; all workers have exited", file=sys.stderr)
        sys.exit(130)
    if not result.has_trained:
        say("the script never called shoal.run(train), so the strategy had no part in it")
    if files is not None and files.reports:
        document = {**run_report(config.strategy or "", workers, result), **files.more}
        if files.more:
            from shoal.observe.report_page.own_schedules import (
                recorded_schedules,  # only where needed
            )

            strategy = as_strategy(config.strategy or "single")
            document["schedules"] = recorded_schedules(strategy, workers, result.reports)
        for report in files.reports:
            report.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


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
    template: Template | None = None,
    on: str | None = None,
) -> None:
    """Run workers without showing their output; a failure is raised with its report."""
    config = replace(config, grace_s=NO_GRACE_S)
    _launch(LaunchSpec(command, workers, config, template=template), discard_lines, on=on)


def _launch(
    spec: LaunchSpec, write: Write, on_progress: OnProgress | None = None, on: str | None = None
) -> RunResult:
    workers = spec.workers
    config = spec.config
    strategy = as_strategy(config.strategy or "single")
    replication = replication_of(strategy, workers, config.restarts)
    spec = replace(spec, servers=strategy.servers(workers), replication=replication)
    if on is None or strategy.is_elastic:  # elsewhere all workers are started again together
        spec = replace(
            spec,
            tolerance=tolerance_of(
                strategy, workers, config.restarts, config.start, config.min_workers
            ),
        )
    if on is None:
        from shoal.worker.environment import refuse_ranks  # only where workers start here

        refuse_ranks(spec.config, "shoal run")
        return launch(spec, write, on_progress)
    from shoal.launch.hosts.remote import run_attempts  # only where it is needed

    with open_engine(on, config) as machines:
        return run_attempts(machines, spec, write, on_progress)


def check_folder(file: Path | None, what: str) -> None:
    """Refuse, before the run, a file that could not be written after it."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
        raise BadInput(f"cannot write {what} to {file}: {why}")


@contextmanager
def traced(config: RunConfig, files: Sequence[Path], timeline: bool = False) -> Iterator[RunConfig]:
    """Collect the spans of all workers into `files`, draw them; yields their configuration."""
    if not files and not timeline:
        yield config
        return
    with scratch_folder("trace") as folder:
        yield replace(config, trace_dir=folder)
        from shoal.commands.output import Part, shares_of_time, show
        from shoal.commands.timeline import parts
        from shoal.observe.time_shares import all_shares, write_chrome
        from shoal.observe.timeline import select
        from shoal.runtime.trace import read_spans

        spans = read_spans(folder)
        is_drawn = timeline and any(spans.values())
        shown: list[Part] = parts(select(spans)) if is_drawn else shares_of_time(all_shares(spans))
        for file in files:
            shown.append(write_chrome(spans, file))
            if file.name == RECORDED_TRACE and (file.parent / RECORDED_REPORT).is_file():
                shown.append(f"page: shoal report {shlex.quote(str(file.parent))}")
        show(None, shown, as_json=False)
