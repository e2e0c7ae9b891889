"""`shoal scale`: how much faster a script becomes with more workers.

    -n 1,2,4,…,1024 on a machine with 4 cores
       1,2,4           measured: the runs of `shoal compare`, in turns with single
            8,…,1024   predicted, as `shoal predict` does

The global batch stays the same on any number of workers (strong scaling): twice the workers are
twice as fast at best, which is the ideal line.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from shoal.cluster.presets import THIS_MACHINE
from shoal.cluster.units import show_seconds
from shoal.commands import options
from shoal.commands.compare import SHORT_STEPS, Comparison, alternating, by_strategy
from shoal.commands.launching import check_folder, command_for, config_for, strategy_for
from shoal.commands.options import option
from shoal.commands.output import Part, plain_table, show, write_text
from shoal.commands.subject import named_cluster, workload_of_script
from shoal.errors import BadInput
from shoal.observe.comparison import RunOutcome
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.runtime.chart import Axis, Points, line_chart, text_chart
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores
from shoal.runtime.preemption import ending_by_exception
from shoal.runtime.wording import counted, say
from shoal.strategy.strategy import as_strategy

MOST_WORKERS = 65_536
MOST_MEASURED = 64
BUSY = 0.1  # of all cores, which other programs take: then times are theirs, too
_COMPUTING = ("forward", "backward", "recompute", "accumulate", "update", "fixed", "cores")
_WAITING = ("bubble", "stragglers")


@dataclass(frozen=True)
class ScaleRow:
    """One strategy on so many workers; speed-ups are over `single` on one. None: not known.

    `low` and `high` are the least and the largest speed-up of the measurements, or what a
    prediction leaves open. `communication`, `waiting`: fractions of the time of a step.
    """

    strategy: str
    workers: int
    how: str  # measured, or predicted
    step_s: float | None = None
    cpu_s_per_step: float | None = None
    speed_up: float | None = None
    low: float | None = None
    high: float | None = None
    communication: float | None = None
    waiting: float | None = None
    predicted_speed_up: float | None = None
    why: str | None = None  # there is no speed-up

    @property
    def efficiency(self) -> float | None:
        return None if self.speed_up is None else self.speed_up / self.workers

    def cells(self) -> list[str]:
        def shown(value: float | None, show: Callable[[float], str]) -> str:
            return "–" if value is None else show(value)

        spread = f"{shown(self.low, _times)[:-1]}-{shown(self.high, _times)}"
        return [
            f"{self.workers:,}",
            self.how,
            shown(self.step_s, show_seconds),
            shown(self.cpu_s_per_step, show_seconds),
            shown(self.speed_up, _times),
            "–" if self.low is None else spread,
            *(shown(v, "{:.0%}".format) for v in (self.efficiency, self.communication)),
            shown(self.waiting, "{:.0%}".format),
            shown(self.predicted_speed_up, _times),
        ]


def scale(
    script: options.Script,
    args: list[str] | None = options.SCRIPT_ARGS,
    strategy: list[str] | None = option(
        "Repeatable.", None, "--strategy", "-s", show_default="ddp"
    ),
    numbers: options.WorkerNumbers = "1,2,4",
    steps: int = option("Of each run.", SHORT_STEPS, min=10),
    processes: int | None = option(
        "Measure up to so many workers.",
        min=1,
        max=MOST_MEASURED,
        show_default="one for each GPU, or core without GPUs",
    ),
    cluster: str | None = option(
        "A cluster file or preset, for what is predicted.", show_default=THIS_MACHINE
    ),
    svg: Path | None = option("Draw speed-ups over workers here."),
    seed: int | None = options.SEED,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Measure how much faster a script becomes with more workers, and predict it beyond.

    Speed-up and efficiency with the ideal line, and what was lost to communication and waiting.
    Runs are in turns with single, as those of `shoal compare`. Numbers of workers beyond the
    GPUs or cores of this machine are predicted, as by `shoal predict`, and marked.
    """
    command = command_for(script, args)
    counts = sorted(options.parse_counts("-n", numbers, MOST_WORKERS))
    check_folder(svg, "a drawing")
    asked = _asked(strategy or ["ddp"], counts)
    target = command[2:] if command[1] == "-m" else command[1:]
    config = config_for(as_strategy("single"), seed, device)
    there, kind = _places(config.device)
    most = processes or there
    here = [n for n in counts if 1 < n <= most]
    notes = [f"warning: {n} workers share {counted(there, kind)}" for n in here if n > there]
    predicted: dict[tuple[str, int], ScaleRow] = {}
    if cluster is not None or counts[-1] > most:
        predicted, said = _predicted(script, args, cluster, asked)
        notes += said
    usage = _Usage()
    runs = {n: [name for name, number in asked if number == n > 1] for n in here or [1]}
    found, ended = _measure(runs, target, config, steps)
    rows = [_measured(one, predicted) for one in found]
    notes += usage.notes()
    rows += [row for row in predicted.values() if row.workers > most]
    _show(script, rows, predicted, notes, svg, as_json)
    if ended is not None:
        raise ended
    if not any(row.step_s for row in rows if row.how == "measured" and row.workers in (1, *here)):
        raise typer.Exit(1)


def _places(device: str | None) -> tuple[int, str]:
    """How many workers have one each, of the GPUs that a run uses, or of the cores."""
    from shoal.worker.worker_group import possible_gpus  # torch: only where it is needed

    gpus = len(possible_gpus(device))
    return (gpus, "GPU") if gpus else (cores(), "core")


def _measure(
    runs: dict[int, list[str]], target: Sequence[str], config: RunConfig, steps: int
) -> tuple[list[RunOutcome], BaseException | None]:
    """By numbers of workers, strategies in turns with single; and what has ended it before."""
    found: list[RunOutcome] = []
    with ending_by_exception(), scratch_folder("compare") as folder:
        for workers, names in runs.items():
            say(f"{counted(workers, 'worker')}: single{''.join(f', {name}' for name in names)}")
            mine = folder / str(workers)
            mine.mkdir()
            groups = alternating(names, workers, mine, steps, False)
            comparison = Comparison(target, config, groups, mine, steps)
            found += by_strategy(comparison)[bool(found) :]
            if comparison.ended is not None:
                return found, comparison.ended
    return found, None


def _times(number: float) -> str:
    return (
        f"{number:.2f}×"
        if number < 10
        else f"{number:,.3g}×"
        if number < 100
        else f"{number:,.0f}×"
    )


def _asked(texts: Sequence[str], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Strategies and the numbers of workers that they can be run on; BadInput if there is none."""
    found: list[tuple[str, int]] = []
    if counts[-1] == 1:
        raise BadInput("a speed-up is that of several workers: give -n such as 1,2,4")
    single = as_strategy("single")  # is there anyway
    for text in [text for text in texts if as_strategy(text) != single]:
        mine = []
        error = None
        for workers in counts:
            try:
                mine.append((str(strategy_for(text, workers)), workers))
            except BadInput as refused:
                error = error or refused
        if error is not None and not [n for _, n in mine if n > 1]:
            raise error
        found += mine
    return [one for one in dict.fromkeys(found) if one[1] > 1]


def _measured(one: RunOutcome, predicted: dict[tuple[str, int], ScaleRow]) -> ScaleRow:
    beside = predicted.get((one.strategy, one.workers))
    waits = None if one.waiting is None or one.exposed is None else one.waiting - one.exposed
    return ScaleRow(
        one.strategy,
        one.workers,
        "measured",
        1 / one.steps_per_s if one.steps_per_s else None,
        one.cpu_s_per_step,
        one.speed_up,
        min(one.speed_ups, default=None),
        max(one.speed_ups, default=None),
        one.exposed,
        waits,
        beside.speed_up if beside else None,
        one.refused or one.failed or one.unmeasured,
    )


def _predicted(
    script: str, args: list[str] | None, cluster: str | None, asked: Sequence[tuple[str, int]]
) -> tuple[dict[tuple[str, int], ScaleRow], list[str]]:
    """By strategy and workers; and what is to be said of the predictions."""
    try:
        subject = workload_of_script(script, args)
    except BadInput as error:
        return {}, [f"nothing is predicted: {error}"]
    hardware = named_cluster(cluster or THIS_MACHINE)
    settings = PlanSettings(subject.batch)
    base = Predictor(subject.workload, hardware).predict(as_strategy("single"), 1, settings)
    found = {}
    notes = {"": f"predicted: workers of {hardware.name}, as `shoal predict` does"}
    if not cluster:
        notes[""] += "; --cluster FILE of `shoal cluster calibrate -o FILE` has measured figures"
    for name, workers in asked:
        value = as_strategy(name)
        at = f"{name} is not predicted from {workers:,} workers on"
        if value.layout(workers).replicas > subject.batch:
            notes.setdefault(name, f"{at}: its batch has {counted(subject.batch, 'sample')}")
            continue
        try:
            predictor = Predictor(subject.workload, hardware.of_size(workers))
            one = predictor.predict(value, workers, settings)
            found[name, workers] = _row_of(one, base.samples_per_s)
        except BadInput as error:
            notes.setdefault(name, f"{at}: {error}")
    return found, list(notes.values())


def _row_of(one: Prediction, base_samples_per_s: float) -> ScaleRow:
    speed_up = one.samples_per_s / base_samples_per_s
    waits = sum(part.seconds for part in one.parts if part.name in _WAITING)
    computes = sum(part.seconds for part in one.parts if part.name in _COMPUTING)
    return ScaleRow(
        one.strategy,
        one.workers,
        "predicted",
        one.step_s,
        speed_up=speed_up,
        low=speed_up * one.step_s / one.high_s,
        high=speed_up * one.step_s / one.low_s,
        communication=max(0.0, 1 - (waits + computes) / one.step_s),
        waiting=waits / one.step_s,
    )


class _Usage:
    """What other programs take of this machine from now on."""

    def __init__(self) -> None:
        self._before = self._read()

    def notes(self) -> Iterator[str]:
        idle, every, own = (
            now - then for now, then in zip(self._read(), self._before, strict=True)
        )
        others = (every - idle - own) / every if every > 0 else 0.0
        if others > BUSY:
            yield (
                f"warning: the machine is busy: other programs took {others:.0%} of its cores "
                "meanwhile; speed-ups are those of what they left"
            )

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds of cores without work, of all of them, and with work of this command."""
        try:
            words = Path("/proc/stat").read_text("ascii").partition("\n")[0].split()[1:9]
        except OSError:
            return 0.0, 0.0, 0.0
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
        used = [resource.getrusage(w) for w in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
        return ticks[3] + ticks[4], sum(ticks), sum(one.ru_utime + one.ru_stime for one in used)


# ------------------------------------------------------------------------------ output


def _show(
    script: str,
    rows: Sequence[ScaleRow],
    predicted: dict[tuple[str, int], ScaleRow],
    notes: Sequence[str],
    svg: Path | None,
    as_json: bool,
) -> None:
    lines = _lines(rows, list(predicted.values()))
    parts = [*_tables(script, rows, bool(predicted))]
    if lines:
        across = Axis("workers", "{:,.0f}".format, is_log=True)
        up = Axis("speed-up", "{:g}".format, is_log=True, base=2.0)
        parts += [*text_chart(across, up, lines), ""]
        if svg is not None:
            write_text(svg, line_chart(f"speed-up of {script}", across, up, lines))
    elif svg is not None:
        notes = [*notes, f"there is no speed-up to draw: {svg} is not written"]
    whys = [f"{one.strategy} on {counted(one.workers, 'worker')}: {one.why}" for one in rows
            if one.why]  # fmt: skip
    parts += [*whys, *notes]
    document: dict[str, Any] = {"script": script, "cores": cores(), "notes": list(notes)}
    document["rows"] = [{**asdict(one), "efficiency": one.efficiency} for one in rows]
    show(document, parts, as_json, wraps=True)


def _lines(rows: Sequence[ScaleRow], predicted: Sequence[ScaleRow]) -> dict[str, Points]:
    """Measured, `~` and predicted, and the ideal line; empty where there is nothing to see."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in (*(row for row in rows if row.how == "measured" and row.workers > 1), *predicted):
        name = one.strategy if one.how == "measured" else f"~{one.strategy}"
        if one.speed_up is not None:
            found.setdefault(name, [(1, 1.0)]).append((one.workers, one.speed_up))
    if not found:
        return {}
    for name in [name for name in found if name[0] == "~" and name[1:] not in found]:
        found[f"{name}, predicted"] = found.pop(name)
    most = max(workers for line in found.values() for workers, _ in line)
    return {**found, "~ideal": [(1, 1.0), (most, most)]}


def _tables(script: str, rows: Sequence[ScaleRow], is_predicted: bool) -> Iterator[Part]:
    heads = ["workers", "", "step", "CPU a\nstep", "speed-\nup", "spread", "effi-\nciency"]
    heads += ["commu-\nnication", "wait-\ning"]
    heads += ["pre-\ndicted"] if is_predicted else []
    single = [row for row in rows if row.workers == 1]
    names = dict.fromkeys(row.strategy for row in rows if row.workers > 1)
    for name in names or ["single"]:
        mine = [row for row in rows if row.strategy == name and row.workers > 1]
        cells = [row.cells()[: len(heads)] for row in (*single, *mine)]
        table = plain_table(f"{script} under {name}, the same global batch", heads, cells)
        table.columns[1].justify = "left"
        yield from (table, "")
