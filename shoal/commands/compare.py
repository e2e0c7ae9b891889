"""`shoal compare`: one script under many strategies, side by side.

The workers are started once and run the script's training function under one strategy after the
other (`script_worker`). Strategies with servers get processes of their own, since servers belong
to one run.

    one step of single                    does the script work at all?
    single  ddp  tp(2)  single            whole runs: what they come to
    ddp  tp(2)  single  ddp  tp(2)  single    short ones: how fast they are beside single
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import typer

from shoal.cluster.units import parse_bytes_per_s
from shoal.commands import options
from shoal.commands.compared import (
    INTERRUPTED,
    WAYS_TO_WAIT,
    result_table,
    speed_table,
    strategies_of,
    target_loss_of,
)
from shoal.commands.launching import WORKER_COMMAND, command_for, config_for
from shoal.commands.options import argument, option, with_options
from shoal.commands.output import Part, show
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.output import discard_lines
from shoal.launch.here.process_config import replication_of
from shoal.launch.losses.lost_workers import tolerance_of
from shoal.observe.comparison import ComparedRun, RunOutcome, losses_of, outcome_of, speed_ups
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import check_faults
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores
from shoal.runtime.preemption import NO_GRACE_S, ending_by_exception
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted, say
from shoal.strategy.strategy import as_strategy

EXAMPLE_STEPS = 120
FAULTY_STEPS = 40  # where workers are slow or lost: each strategy has twice as many runs
SHORT_STEPS = 30  # of runs that only measure a speed
SHORT_ROUNDS = 2
STRATEGIES = option(
    "A strategy to compare; repeatable.",
    None,
    "--strategy",
    "-s",
    show_default="all that this version runs; under faults one for each way to wait",
)
SLOW_LINK = option(
    "1:100Mb/s: worker 1 sends at this rate at most, by waiting at the end of a step "
    "for what it sent in it; repeatable."
)
COMPARED_STEPS = option(
    "Stop each run after so many steps.",
    min=1,
    show_default=f"{EXAMPLE_STEPS} for an example, {FAULTY_STEPS} under faults, else where the "
    "script ends",
)


def compare(
    script: str | None = argument(
        "A script that calls shoal.run, or an example.", show_default="gpt --size tiny"
    ),
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: options.Workers = 2,
    strategy: list[str] | None = STRATEGIES,
    steps: int | None = COMPARED_STEPS,
    slow: list[str] | None = options.SLOW,
    slow_link: list[str] | None = SLOW_LINK,
    kill: list[str] | None = options.KILL,
    until: str | None = options.UNTIL,
    seed: int | None = options.SEED,
    device: options.Device = None,
    apart: bool = option("Start new processes for every strategy.", False, "--apart"),
    virtual: bool = option("Rehearse it, as shoal rehearse does.", False, "--virtual"),
    cluster: str | None = option("Rehearse it on this cluster: a file, or a preset."),
    as_json: options.Json = False,
) -> None:
    """Train one model under many strategies, and compare them.

    The table has the result, the speed, the bytes that a worker sends, and the difference to a
    run on one worker. With --slow, --slow-link and --kill a laboratory of stragglers: what they
    cost each strategy.
    """
    if script is None:  # without BatchNorm, whose statistics differ between strategies
        script = "gpt"
        args = ["--size", "tiny"]
    if virtual or cluster is not None:
        from shoal.commands.rehearse import rehearse  # loads the planner

        if slow_link or device or apart:
            raise BadInput("--virtual takes no --slow-link, --device or --apart")
        more: dict[str, Any] = {"slow": slow, "kill": kill, "until": until, "seed": seed}
        with_options(rehearse)(
            script, args, workers, strategy, cluster, steps, as_json=as_json, **more
        )
        return
    command = command_for(script, args)
    target = command[2:] if command[1] == "-m" else command[1:]
    has_faults = bool(slow or slow_link or kill)
    names = strategies_of(strategy or (WAYS_TO_WAIT if has_faults else None), workers)
    if steps is None and target[0].startswith("shoal.commands.examples."):
        steps = FAULTY_STEPS if has_faults else EXAMPLE_STEPS
    config = config_for(as_strategy("single"), seed, device)
    config = replace(config, slow=tuple(slow or ()), kill=tuple(kill or ()))
    check_faults(config, workers, why_no_servers="shoal compare slows and kills workers")
    faults = RunFaults(bool(slow or slow_link), bool(kill), _rates(slow_link or (), workers))
    target_loss = target_loss_of(until)
    with ending_by_exception(), scratch_folder("compare") as folder:
        groups = alternating(names, workers, folder, steps, apart, faults)
        comparison = Comparison(
            target, config, groups, folder, steps, faults.slow_links, target_loss
        )
        outcomes = by_strategy(comparison)
    document: dict[str, Any] = {"script": script, "workers": workers, "seed": seed or 0}
    document |= {"complete": not comparison.ended, "runs": [one.to_json() for one in outcomes]}
    show(document, _parts(document, outcomes, until), as_json, width=80, wraps=True)
    if comparison.ended is not None:
        raise comparison.ended
    if not any(outcome.ran for outcome in outcomes[1:]) or not outcomes[0].ran:
        raise typer.Exit(1)


def _parts(
    document: dict[str, Any], outcomes: Sequence[RunOutcome], until: str | None
) -> list[Part]:
    """The tables, and why some rows are not whole."""
    length = f", {counted(outcomes[0].steps, 'step')}" if outcomes[0].ran else ""
    length += "" if document["complete"] else " (incomplete)"
    title = f"{document['script']} on {counted(document['workers'], 'worker')}{length}"
    whys = [(one.strategy, one.refused or one.failed or one.unmeasured) for one in outcomes]
    said = (f"{name}: {why}" for name, why in whys if why and why != INTERRUPTED)
    return [speed_table(outcomes, title), result_table(outcomes, until), *said]


@dataclass(frozen=True)
class RunFaults:
    """What the runs of a comparison suffer, those of single apart."""

    slows: bool = False
    kills: bool = False
    slow_links: dict[int, float] = field(default_factory=dict)  # seconds a byte, by rank


def _rates(texts: Sequence[str], workers: int) -> dict[int, float]:
    """By worker, the seconds for a byte that it sends."""
    found: dict[int, float] = {}
    for text in texts:
        rank, _, rate = text.partition(":")
        bytes_per_s = parse_bytes_per_s(rate) if rank.isdecimal() and rank.isascii() else None
        if not bytes_per_s or int(rank[:9]) >= workers or int(rank) in found:
            raise BadInput(
                f"--slow-link takes a worker, each once, and a rate, such as "
                f"{workers - 1}:100Mb/s, not {text[:40]!r}"
            )
        found[int(rank)] = 1 / bytes_per_s
    return found


def by_strategy(comparison: Comparison) -> list[RunOutcome]:
    """What the whole run of each strategy came to, with the speed of all of its runs."""
    found = comparison.measure()
    pairs = list(zip(comparison.entries, found, strict=True))
    compared = speed_ups(outcome for run, outcome in pairs if not run.is_clean)
    rows = []
    for one in [outcome for run, outcome in pairs if run.is_whole]:
        same = [(run, outcome) for run, outcome in pairs if run.strategy == one.strategy]
        mine = [each for each in same if not each[0].is_clean]
        alike = [
            [o for run, o in mine if run.threads == n] for n in {run.threads for run, _ in mine}
        ]
        ratios = [1.0] if one.is_single else compared.get(one.strategy, ())
        speeds = [one.with_speeds(runs, ratios) for runs in alike]
        best = max(speeds, key=lambda outcome: outcome.steps_per_s or 0.0)
        usual = [o.steps_per_s for run, o in same if run.is_clean and o.steps_per_s]
        if usual and best.steps_per_s:
            best = replace(best, slowed=median(usual) / best.steps_per_s)
        rows.append(best)
    return rows


def alternating(
    names: Sequence[str],
    workers: int,
    folder: Path,
    steps: int | None,
    apart: bool,
    faults: RunFaults | None = None,
) -> list[list[ComparedRun]]:
    """All runs, by the processes that they share: each strategy has single before and behind it.

    Where workers are slow, there are short runs without that, too, in turns with those.
    """
    faults = faults or RunFaults()
    short = min(steps or SHORT_STEPS, SHORT_STEPS)
    threads = max(1, cores() // workers)
    numbers = itertools.count()

    def run(
        name: str, steps: int | None = None, threads: int | None = None, clean: bool = False
    ) -> ComparedRun:
        number = next(numbers)
        num_workers = 1 if name == "single" else workers
        mine = str(folder / str(number))
        killed = faults.kills and name != "single"
        return ComparedRun(
            number, name, num_workers, mine, steps, True, threads, clean, may_lose=killed
        )

    def singles(steps: int | None = short) -> list[ComparedRun]:
        narrow = [run("single", short, threads)] if threads < cores() else []
        return [run("single", steps), *narrow]

    if apart or faults.kills:
        return [[run("single")], *([run(name)] for name in names), [run("single", short)]]
    served = [n for n in names if as_strategy(n).sync_for(workers).has_servers]
    shared = [n for n in names if n not in served]
    together = [run("single", 1), *singles(None), *map(run, shared), *singles()]
    for _ in range(SHORT_ROUNDS if shared else 0):
        together += [run(name, short) for name in shared]
        together += [run(name, short, clean=True) for name in shared if faults.slows]
        together += singles()
    groups = [together, *([*singles(), run(name), *singles()] for name in served)]
    return groups + [[run(name, short, clean=True)] for name in served if faults.slows]


@dataclass
class Comparison:
    """Starts processes for groups of runs, and continues when one of the runs fails.

    A line on stderr says which run has begun. A signal leaves the runs that have finished.
    """

    target: Sequence[str]  # a script, or the module of an example, and its arguments
    config: RunConfig
    groups: Sequence[Sequence[ComparedRun]]  # each in processes of its own
    folder: Path
    steps: int | None = None
    slow_links: dict[int, float] = field(default_factory=dict)
    until: float | None = None
    failed: dict[str, str] = field(default_factory=dict)  # why, by strategy
    ended: KeyboardInterrupt | SystemExit | None = None  # by a signal, before all runs

    @property
    def entries(self) -> list[ComparedRun]:
        return [entry for group in self.groups for entry in group]

    @property
    def base(self) -> ComparedRun:
        """The run that others are compared with."""
        return next((entry for entry in self.entries if entry.is_whole), self.entries[0])

    def measure(self) -> list[RunOutcome]:
        """The results of all entries."""
        for entry in self.entries:
            Path(entry.folder).mkdir()
        try:
            for group in self.groups:
                self._run(list(group))
        except (KeyboardInterrupt, SystemExit) as signalled:
            self.ended = signalled
        losses = losses_of(self.base)
        base = outcome_of(self.base, None, losses, self.until)
        found = [
            base if entry == self.base else outcome_of(entry, base, losses, self.until)
            for entry in self.entries
        ]
        why = {one.strategy: INTERRUPTED for one in found if self.ended} | self.failed
        lost = self.failed if any(entry.may_lose for entry in self.entries) else {}
        return [
            replace(one, failed=why.get(one.strategy, one.failed))
            if one.failed or one.strategy in lost
            else one
            for one in found
        ]

    def _run(self, group: list[ComparedRun]) -> None:
        while group:
            try:
                self._launch(group)
                return
            except ShoalError as error:
                begun = [e for e in group if RunDir(Path(e.folder)).begun.exists()]
                if not begun:
                    raise  # the script itself
                last = begun[-1]
                group = group[group.index(last) + 1 :]
                if None in RunDir(Path(last.folder)).read_reports(last.workers):
                    if last.is_first:
                        raise  # the script itself: other rows would fail alike
                    why = str(error).splitlines()[-1]
                    self.failed[last.strategy] = why.removeprefix("shoal.errors.ShoalError: ")
                    group = [entry for entry in group if entry.strategy != last.strategy]

    def _launch(self, group: Sequence[ComparedRun]) -> None:
        document: dict[str, Any] = {"entries": [asdict(entry) for entry in group]}
        document |= {"steps": self.steps, "cores": cores(), "base": asdict(self.base)}
        document["slow_links"] = self.slow_links
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps(document), encoding="utf-8")
        command = [*WORKER_COMMAND, "compare", str(plan), *self.target]
        workers = max(entry.workers for entry in group)
        strategies = [as_strategy(entry.strategy) for entry in group]
        served = max(strategies, key=lambda one: one.servers(workers))  # one at most has servers
        config = replace(self.config, strategy=str(served), grace_s=NO_GRACE_S)
        copies = replication_of(served, workers)
        spec = LaunchSpec(command, workers, config, served.servers(workers), replication=copies)
        if group[0].may_lose:
            spec = replace(spec, tolerance=tolerance_of(served, workers))
        launch(spec, discard_lines, self._say_begun)

    def _say_begun(self, record: dict[str, Any]) -> None:
        for entry in self.entries:
            if entry.number == record.get("entry") and entry.is_whole:
                say(f"running {entry.strategy}")
