"""`shoal rehearse`: train on a cluster that is not there, and see the loss over its seconds.

One process runs all workers and servers of a strategy, one at a time, in virtual time
(`shoal/rehearse/`). Strategies follow each other.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from shoal.cluster import Cluster
from shoal.cluster.presets import THIS_MACHINE
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.compared import (
    WAYS_TO_WAIT,
    result_table,
    speed_table,
    strategies_of,
    target_loss_of,
)
from shoal.commands.launching import WorkersOptions, command_for, config_for, run_quietly
from shoal.commands.options import option
from shoal.commands.output import Part, json_text, shares_of_time, show, write_text
from shoal.commands.subject import Subject, named_cluster, workload_of_command
from shoal.errors import BadInput, ShoalError
from shoal.launch.losses.lost_workers import run_report, taking_back
from shoal.observe.comparison import ComparedRun, RunOutcome, outcome_from
from shoal.observe.time_shares import all_shares, write_chrome
from shoal.plan.profile import profiled
from shoal.plan.step.slow_workers import Unevenness
from shoal.runtime.faults import read_kills, read_slow
from shoal.runtime.lazy_dynamo import load_when_used
from shoal.runtime.wording import counted, say
from shoal.strategy.strategy import as_strategy
from shoal.worker.auto import measure_profile

STRATEGIES = option(
    "A strategy to rehearse; repeatable.",
    None,
    "--strategy",
    "-s",
    show_default="one for each way to wait",
)


_MOST_WORKERS = 4096
_PROGRESS_S = 10.0  # between two lines
_OF_LOSSES = ("loss", "training_loss", "first_loss", "evaluated", "loss_difference", "loss_gap")


@dataclass(frozen=True)
class RehearsalMishaps:
    """What does not go well in a rehearsal."""

    slow: list[str] | None = options.SLOW
    kill: list[str] | None = option(
        "Lose a worker, server or host: 2@50 loses worker 2 at step 50, server:1@90s server 1 "
        "after 90 s, host:0@5min all that runs on host 0; repeatable."
    )
    mtbf: str | None = option(
        "Lose hosts by chance: mean time between failures of any of them, as 8h."
    )
    events: Path | None = option("A file with moments of losses.")
    restart: int | None = options.RESTART
    restart_time: str = option(
        "From a loss to the start of the next process.", "10s", metavar="TIME"
    )
    jitter: float | None = option(
        "Standard deviation of a step's computing, as a share of it.",
        show_default="that of the cluster",
    )

    def losses(self, workers: int) -> Any:
        from shoal.rehearse.losses import read_losses  # loads torch

        found = read_losses(
            self.kill or (), self.mtbf, self.events, self.restart, self.restart_time
        )
        read_kills(found.at_steps, workers)
        return found


_UNDISTURBED = RehearsalMishaps()


def rehearse(
    script: options.Script,
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: options.Workers = 4,
    strategy: list[str] | None = STRATEGIES,
    cluster: str | None = option(
        "A cluster file, or a preset such as dgx-a100.", show_default=THIS_MACHINE
    ),
    steps: int | None = option("Stop after so many steps.", min=1, show_default="script's"),
    measure: bool = option(
        "Measure the passes of the model with so many workers on this machine, "
        "instead of adding up kernels.",
        False,
        "--measure",
    ),
    no_train: bool = option(
        "Compute nothing large: the same messages and seconds, without gradients and losses.",
        False,
        "--no-train",
    ),
    disturbed: RehearsalMishaps = _UNDISTURBED,
    until: str | None = options.UNTIL,
    seed: int | None = options.SEED,
    trace: Path | None = options.TRACE,
    record: Path | None = option(
        "Keep timeline, losses and report of the last strategy in DIR, for shoal report.",
        metavar="DIR",
    ),
    as_json: options.Json = False,
) -> None:
    """Train on a cluster that you do not have, in one process: which strategy is there first?

    Gradients, updates and messages are real, seconds are virtual: computing lasts what the
    planner says of the cluster's devices, messages what its links let through. The same command
    gives the same bits and seconds.
    """
    from shoal.rehearse.pace import uneven_of  # loads torch

    files = WorkersOptions(trace=trace, record=record).files
    names = strategies_of(strategy or WAYS_TO_WAIT, workers)
    if any(as_strategy(name) == as_strategy("single") for name in strategy or ()):
        names = ["single", *names]  # on one worker, for the others to be compared with
    if workers > _MOST_WORKERS:
        raise BadInput(
            f"a rehearsal runs {_MOST_WORKERS:,} workers at most; shoal predict says how long a "
            "step of more takes"
        )
    if no_train and (asked := "--until" if until else "--record" if record else ""):
        raise BadInput(f"{asked} is about losses, and with --no-train there are none")
    target = target_loss_of(until)
    hardware = named_cluster(cluster or THIS_MACHINE)
    slow = disturbed.slow or ()
    slowness = read_slow(slow, workers)
    losses = disturbed.losses(workers)
    losses.check(hosts=hardware.of_size(workers).nodes, workers=workers)
    command = command_for(script, args)
    say("reading the model of the script")
    subject = workload_of_command(command)
    ready: tuple[tuple[float, float], ...] = ()
    if measure:
        hardware, ready = _measured(command, hardware, subject, workers)
    uneven = uneven_of(hardware.of_size(workers), slowness, disturbed.jitter, seed or 0)
    slow_servers = read_slow(slow, None, "server")
    stage = _Stage(
        subject, hardware, workers, steps, uneven, slow_servers, seed or 0, losses, ready,
        trains=not no_train,
    )  # fmt: skip
    words = command[2:] if command[1] == "-m" else command[1:]
    stage.rehearse_script(words, names, target)
    if stage.latest is not None:
        for file in files.traces:
            say(write_chrome(stage.latest.spans, file))
        for file in files.reports:
            write_text(file, json_text(stage.report(command, cluster or THIS_MACHINE)))
    shown = [outcome for outcome in stage.outcomes if outcome.ran]
    document = {
        "script": script,
        "workers": workers,
        "cluster": stage.hardware.name,
        "seed": seed or 0,
        "runs": [one.to_json() | stage.more[one.strategy] for one in stage.outcomes],
    }
    parts = _parts(stage, document, until, bool(files.traces))
    show(document, parts, as_json, width=80, wraps=True)
    if not shown:
        raise typer.Exit(2 if all(one.refused for one in stage.outcomes) else 1)


def _measured(
    command: list[str], hardware: Cluster, subject: Subject, workers: int
) -> tuple[Cluster, tuple[tuple[float, float], ...]]:
    """The cluster with passes as long as on this machine, and when gradients are ready in them."""
    say(f"measuring its passes on {counted(workers, 'worker')}")
    config = config_for(as_strategy("single"))
    profile = measure_profile(partial(run_quietly, command), config, workers)
    return profiled(hardware.of_size(workers), subject.workload, [profile]), profile.ready


@dataclass
class _Stage:
    """Rehearses one strategy after the other."""

    subject: Subject
    hardware: Cluster
    workers: int
    steps: int | None
    uneven: Unevenness
    slow_servers: dict[int, float]
    seed: int
    losses: Any
    ready: tuple[tuple[float, float], ...]  # as in WorkerTimes
    trains: bool = True
    outcomes: list[RunOutcome] = field(default_factory=list)
    more: dict[str, dict[str, Any]] = field(default_factory=dict)  # by strategy
    latest: Any = None  # what the latest came to, as `world.Rehearsed`

    def report(self, command: Sequence[str], cluster: str) -> dict[str, Any]:
        """Of the latest, as `shoal run --record` writes it."""
        from shoal.commands.run import recorded  # only where needed
        from shoal.observe.report_page.own_schedules import recorded_schedules

        name = next(one.strategy for one in reversed(self.outcomes) if one.ran)
        workers = len(self.latest.result.reports)
        about = recorded(command, workers, config_for(as_strategy(name)), cluster)
        found = run_report(name, workers, self.latest.result)
        own = recorded_schedules(as_strategy(name), workers, self.latest.result.reports)
        return found | about | {"rehearsed": self.hardware.name, "schedules": own}

    def rehearse_script(self, words: list[str], names: Sequence[str], until: float | None) -> None:
        """Run a script up to `shoal.run`, and rehearse its training function from there."""
        from shoal.commands.script_worker import run_script

        load_when_used()

        def all_strategies(train: Any) -> None:
            for name in names:
                say(f"rehearsing {name}")
                self._rehearse(train, name, until)

        with contextlib.suppress(SystemExit), _unheard():
            run_script(words, all_strategies)

    def _rehearse(self, train: Any, name: str, until: float | None) -> None:
        from shoal.rehearse.pace import step_times
        from shoal.rehearse.world import RehearsalSpec, rehearse

        value = as_strategy(name)
        workers = 1 if name == "single" else self.workers
        single = next((one for one in self.outcomes if one.is_single and one.ran), None)
        losses = self.more["single"]["losses"] if single else ()
        self.more[name] = {}
        try:
            if self.losses.restarts:
                value = taking_back(value, self.workers)
            times = step_times(
                self.subject.workload, self.hardware, value, workers, self.subject.batch
            )
            spec = RehearsalSpec(
                value,
                workers,
                self.hardware,
                replace(times, ready=self.ready),
                self.uneven,
                self.seed,
                self.steps,
                self.slow_servers,
                losses=self.losses,
                progress=_progress(name),
                trains=self.trains,
            )
            done = rehearse(train, spec)
        except BadInput as error:
            self.outcomes.append(RunOutcome(name, workers, refused=str(error)))
            return
        except ShoalError as error:
            self.outcomes.append(RunOutcome(name, workers, failed=str(error)))
            return
        run = ComparedRun(len(self.outcomes), name, workers, "")
        found = outcome_from(run, done.reports, done.spans, single, losses, until)
        if not self.trains:
            none: dict[str, Any] = dict.fromkeys(_OF_LOSSES)
            found = replace(found, **none)
        self.outcomes.append(found)
        self.latest = done
        busiest = next(iter(done.link_bytes.items()), None)
        self.more[name] = {
            "virtual_s": done.seconds,
            "losses": done.reports[0]["losses"] if self.trains else [],
            "loss_s": done.reports[0]["loss_s"] if self.trains else [],
            "link_bytes": done.link_bytes,
            "busiest": busiest,
            "said": done.said,
            "missed_updates": _missed(done.reports) if found.staleness else {},
        }


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What the script prints, as often as there are workers, in whatever way, is not shown."""
    kept = os.dup(1)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        os.dup2(nothing.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _progress(name: str) -> Callable[[Any], None]:
    """Says now and then how far worker 0 is; a rehearsal redirects stderr."""
    last_s = time.monotonic()
    stderr = sys.stderr

    def progress(job: Any) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _PROGRESS_S:
            last_s = time.monotonic()
            print(f"shoal: {name}: worker 0 has done step {job.steps}", file=stderr, flush=True)

    return progress


def _missed(reports: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many updates there were between a pull and its push, and how often."""
    servers = [one["servers"][0] for one in reports[0]["sync"] if one.get("servers")]
    return servers[0].get("missed_updates") or {} if servers else {}


def _parts(
    stage: _Stage, document: dict[str, Any], until: str | None, shows_spans: bool
) -> list[Part]:
    from shoal.sync.ps.summary import histogram  # loads torch

    outcomes = stage.outcomes
    title = (
        f"{document['script']} rehearsed on {counted(stage.workers, 'worker')} of "
        f"{stage.hardware.name}: seconds are virtual"
    )
    nodes = stage.hardware.nodes
    needed = stage.hardware.of_size(stage.workers).nodes
    said = [f"the cluster has {counted(nodes, 'node')}; rehearsed as if it had {needed}"]
    said = said if needed > nodes else []
    whys = [f"{one.strategy}: {why}" for one in outcomes if (why := one.refused or one.failed)]
    for one in outcomes:
        more = stage.more[one.strategy]
        if more:
            bad = (step for step, loss in enumerate(more["losses"], 1) if not math.isfinite(loss))
            if (step := next(bad, None)) is not None:
                said.append(f"{one.strategy}: the loss of step {step} is not a finite number")
            link = more["busiest"]
            carried = f", {show_bytes(link[1])} over {link[0]}" if link else ""
            took = show_seconds(more["virtual_s"])
            missed = histogram(more["missed_updates"])
            late = f"updates between a pull and its push, and how often: {missed}"
            lines = [
                *([late] if missed else []),
                *more["said"],
                f"the last worker ends after {took}{carried}",
            ]
            said += [f"{one.strategy}: {line}" for line in lines]
    shares = []
    if shows_spans and stage.latest is not None:
        shares = shares_of_time(all_shares(stage.latest.spans))
    tables = [speed_table(outcomes, title)]
    if stage.trains:
        tables.append(result_table(outcomes, until))
    else:
        said.append("nothing was trained (--no-train): there are no losses")
    return [*tables, *said, *whys, *shares]
