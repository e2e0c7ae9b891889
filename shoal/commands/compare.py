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
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.launching import WORKER_COMMAND, command_for, config_for, strategy_for
from shoal.commands.output import Part, plain_table, show
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.output import discard_lines
from shoal.launch.here.process_config import replication_of
from shoal.observe.comparison import ComparedRun, RunOutcome, losses_of, outcome_of, speed_ups
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores
from shoal.runtime.preemption import NO_GRACE_S, ending_by_exception
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted, say
from shoal.strategy.strategy import as_strategy
from shoal.strategy.terms import TERMS

EXAMPLE_STEPS = 120
SHORT_STEPS = 30  # of runs that only measure a speed
SHORT_ROUNDS = 2
INTERRUPTED = "interrupted"  # why a run has no result after a signal
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        help="A strategy to compare; repeatable.",
        show_default="all that this version runs",
    ),
]


def compare(
    script: options.Script = "digits",
    args: options.ScriptArgs = None,
    workers: options.Workers = 2,
    strategy: Strategies = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop each run after so many steps.",
            show_default=f"{EXAMPLE_STEPS} for an example, else where the script ends",
        ),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = None,
    apart: Annotated[
        bool, typer.Option("--apart", help="Start new processes for every strategy.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Train one model under many strategies, and compare them.

    The table has the result, the speed, the bytes that a worker sends, and the difference to a
    run on one worker.
    """
    command = command_for(script, args)
    target = command[2:] if command[1] == "-m" else command[1:]
    names = _strategies(strategy, workers)
    if steps is None and target[0].startswith("shoal.examples."):
        steps = EXAMPLE_STEPS
    config = config_for(as_strategy("single"), seed, device)
    with ending_by_exception(), scratch_folder("compare") as folder:
        groups = alternating(names, workers, folder, steps, apart)
        comparison = Comparison(target, config, groups, folder, steps)
        outcomes = by_strategy(comparison)
    document: dict[str, Any] = {"script": script, "workers": workers, "seed": seed or 0}
    document |= {"complete": not comparison.ended, "runs": [one.to_json() for one in outcomes]}
    length = f", {counted(outcomes[0].steps, 'step')}" if outcomes[0].ran else ""
    length += " (incomplete)" if comparison.ended else ""
    table = _table(outcomes, f"{script} on {counted(workers, 'worker')}{length}")
    whys = [(one.strategy, one.refused or one.failed or one.unmeasured) for one in outcomes]
    parts: list[Part] = [table, *(f"{n}: {why}" for n, why in whys if why and why != INTERRUPTED)]
    show(document, parts, as_json, width=140)
    if comparison.ended is not None:
        raise comparison.ended
    if not any(outcome.ran for outcome in outcomes[1:]) or not outcomes[0].ran:
        raise typer.Exit(1)


def by_strategy(comparison: Comparison) -> list[RunOutcome]:
    """What the whole run of each strategy came to, with the speed of all of its runs."""
    found = comparison.measure()
    compared = speed_ups(found)
    pairs = list(zip(comparison.entries, found, strict=True))
    rows = []
    for one in [outcome for run, outcome in pairs if run.is_whole]:
        mine = [(run, outcome) for run, outcome in pairs if run.strategy == one.strategy]
        alike = [
            [o for run, o in mine if run.threads == n] for n in {run.threads for run, _ in mine}
        ]
        ratios = [1.0] if one.is_single else compared.get(one.strategy, ())
        speeds = [one.with_speeds(runs, ratios) for runs in alike]
        rows.append(max(speeds, key=lambda outcome: outcome.steps_per_s or 0.0))
    return rows


def alternating(
    names: Sequence[str], workers: int, folder: Path, steps: int | None, apart: bool
) -> list[list[ComparedRun]]:
    """All runs, by the processes that they share: each strategy has single before and behind it."""
    short = min(steps or SHORT_STEPS, SHORT_STEPS)
    threads = max(1, cores() // workers)
    numbers = itertools.count()

    def run(name: str, steps: int | None = None, threads: int | None = None) -> ComparedRun:
        number = next(numbers)
        num_workers = 1 if name == "single" else workers
        return ComparedRun(
            number, name, num_workers, str(folder / str(number)), steps, threads=threads
        )

    def singles(steps: int | None = short) -> list[ComparedRun]:
        narrow = [run("single", short, threads)] if threads < cores() else []
        return [run("single", steps), *narrow]

    if apart:
        return [[run("single")], *([run(name)] for name in names), [run("single", short)]]
    served = [n for n in names if as_strategy(n).sync_for(workers).has_servers]
    shared = [n for n in names if n not in served]
    together = [run("single", 1), *singles(None), *map(run, shared), *singles()]
    for _ in range(SHORT_ROUNDS if shared else 0):
        together += [*(run(name, short) for name in shared), *singles()]
    return [together, *([*singles(), run(name), *singles()] for name in served)]


def _strategies(given: Sequence[str] | None, workers: int) -> list[str]:
    """Those that are given, or one of each kind, and the options that matter most."""
    if given:
        others = [text for text in given if as_strategy(text) != as_strategy("single")]
        return list(dict.fromkeys(str(strategy_for(text, workers)) for text in others))
    names = []
    for text in (text for term in TERMS.values() for text in term.compared):
        with suppress(BadInput):  # not built, or not for this number of workers
            names.append(str(strategy_for(text, workers)))
    return names


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
        base = outcome_of(self.base, None, losses)
        found = [outcome_of(e, None if e == self.base else base, losses) for e in self.entries]
        why = {one.strategy: INTERRUPTED for one in found if self.ended} | self.failed
        return [
            replace(one, failed=why.get(one.strategy, one.failed)) if one.failed else one
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
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps(document), encoding="utf-8")
        command = [*WORKER_COMMAND, "compare", str(plan), *self.target]
        workers = max(entry.workers for entry in group)
        strategies = [as_strategy(entry.strategy) for entry in group]
        served = max(strategies, key=lambda one: one.servers(workers))  # one at most has servers
        config = replace(self.config, strategy=str(served), grace_s=NO_GRACE_S)
        copies = replication_of(served, workers)
        spec = LaunchSpec(command, workers, config, served.servers(workers), replication=copies)
        launch(spec, discard_lines, self._say_begun)

    def _say_begun(self, record: dict[str, Any]) -> None:
        for entry in self.entries:
            if entry.number == record.get("entry") and entry.is_whole:
                say(f"running {entry.strategy}")


# ------------------------------------------------------------------------------ output


def _table(outcomes: Sequence[RunOutcome], title: str) -> Table:
    names = [list(o.evaluated) for o in outcomes if o.evaluated]
    metric = next((name for group in names for name in group if name != "loss"), None)
    tested = any("loss" in group for group in names)
    heads = ["strategy", "test\nloss" if tested else "loss"]
    heads += [] if metric is None else [metric or "metric"]
    heads += ["steps/s", "CPU a\nstep", "speed-\nup", "sent a\nstep", "idle", "against single"]
    table = plain_table(title, heads, [_row(outcome, metric) for outcome in outcomes], left=1)
    table.columns[-1].justify = "left"
    table.columns[0].overflow = "fold"
    return table


def _row(outcome: RunOutcome, metric: str | None) -> list[str]:
    def shown(value: float | None, form: str, unit: str = "") -> str:
        return "–" if value is None else format(value, form) + unit

    row = [outcome.strategy, shown(outcome.loss, ".4f")]
    if metric is not None:
        value = (outcome.evaluated or {}).get(metric)
        row.append(shown(value, ".1%" if metric == "accuracy" else ".4g"))
    sent = outcome.bytes_sent
    row += [
        shown(outcome.steps_per_s, ",.1f"),
        "–" if outcome.cpu_s_per_step is None else show_seconds(outcome.cpu_s_per_step),
        shown(outcome.speed_up, ".2f", "×"),
        "–" if sent is None else show_bytes(sent / max(1, outcome.steps)),
        "–" if outcome.computing is None else f"{1 - outcome.computing:.0%}",
    ]
    if not outcome.ran:
        is_failed = outcome.failed != INTERRUPTED
        return [*row, "refused" if outcome.refused else "failed" if is_failed else INTERRUPTED]
    return [*row, "" if outcome.workers == 1 else outcome.against_single]
