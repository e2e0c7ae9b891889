"""The results of one script under several strategies, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

from shoal.observe.time_shares import Arrivals, TimeShares, time_shares
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import Trace, read_spans
from shoal.runtime.wording import counted, listed
from shoal.strategy.base import Batches
from shoal.strategy.strategy import as_strategy

LAST = 0.1  # the fraction of steps at the end that the final training loss is a mean over
EQUAL = 0.01  # of the largest loss: more than rounding changes it
SPREAD = 1.5  # the largest speed-up over the smallest, up to which their median is a verdict
CREDIBLE = 1.2  # a speed-up over the number of workers: caches give that much, no more
_SLOW = 10  # times as long as single, which a run may take, and at least
_PATIENCE_S = 60.0
_WINDOW = 10  # steps whose mean loss is compared with that of --until


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    number: int
    strategy: str
    workers: int
    folder: str
    steps: int | None = None  # after which it is stopped; None: as many as all others
    traced: bool = True  # spans take time, too: without them there is no idle time
    threads: int | None = None  # of one worker; None: as many as it has cores
    is_clean: bool = False  # without the faults of the comparison, to see what these cost
    may_lose: bool = False  # workers are killed: those that are left have the result

    @property
    def is_first(self) -> bool:
        """Whether the script works at all: where it does not, no other run would."""
        return self.number == 0 and self.strategy == "single"

    @property
    def is_whole(self) -> bool:
        """Not stopped before the others, to measure a speed."""
        return self.steps is None


@dataclass(frozen=True)
class RunOutcome:
    """The result of one run, for machines; None where it is not known.

    Speeds and fractions of time leave out the first fifth of the steps, and are means over workers
    where they do not say otherwise.
    """

    strategy: str
    workers: int
    refused: str | None = None
    failed: str | None = None
    steps: int = 0
    loss: float | None = None  # the latest "loss" of job.evaluate, else the training loss
    training_loss: float | None = None  # the mean over the last tenth of the steps and all workers
    first_loss: float | None = None
    evaluated: dict[str, float] | None = None
    steps_per_s: float | None = None
    steps_per_s_between: tuple[float, float] | None = None  # of the slowest and the fastest worker
    samples_per_s: float | None = None  # of all workers, as is the next
    cpu_s_per_step: float | None = None
    speed_up: float | None = None  # the median of the next, if they agree and workers can do that
    speed_ups: tuple[float, ...] = ()  # of each run over those of single just before and behind it
    bytes_sent: float | None = None  # by a worker in the whole run
    computing: float | None = None
    waiting: float | None = None  # for others
    exposed: float | None = None  # of it: communication
    idle: float | None = None  # the rest
    loss_difference: float | None = None  # the largest to single, of the largest loss; if promised
    loss_gap: float | None = None  # loss minus single's
    single_steps: int | None = None  # after which single had its own
    injected: float | None = None
    slowed: float | None = None  # the time of a step over that without faults
    lost: tuple[int, ...] = ()  # killed workers
    dropped: int | None = None  # pushes that came too late
    skipped: int | None = None  # steps that workers have left out, because they were far behind
    staleness: float | None = None  # updates (gossip: steps) between reading weights and using them
    until_s: float | None = None  # from the end of the first step to a loss as low as --until says
    until_steps: int | None = None

    @property
    def ran(self) -> bool:
        return self.refused is None and self.failed is None

    @property
    def is_single(self) -> bool:
        return self.workers == 1 and as_strategy(self.strategy) == as_strategy("single")

    @property
    def has_batches(self) -> bool:
        """A step is of one batch, as that of single is, not of the whole dataset."""
        kind = as_strategy(self.strategy).sync_for(self.workers).batches
        return kind is not Batches.WHOLE_DATASET

    @property
    def against_single(self) -> str:
        """The difference to single, or what was measured where a strategy promises none."""
        if self.loss_difference is not None:
            is_equal = self.loss_difference <= EQUAL
            shown = f"{self.loss_difference:.0e}" if is_equal else f"{self.loss_difference:.1%}"
            return f"equal ({shown})" if is_equal else f"differs by {shown}"
        lost = f"without {listed('worker', self.lost)}: " if self.lost else ""
        if self.loss is None:
            return f"{lost}the loss is not a finite number"
        is_as_long = self.single_steps in (None, self.steps)
        words = f"{lost}loss {self.loss:.3f}"
        words += "" if is_as_long else f" after {counted(self.steps, 'step')}"
        first = self.first_loss
        last = self.training_loss
        if first is not None and last is not None and last >= first:
            words += f", at the start {first:.3f}"
        if self.loss_gap is not None:
            words += f", single {self.loss - self.loss_gap:.3f}"
        return words if is_as_long else f"{words} after {self.single_steps}"

    @property
    def unmeasured(self) -> str | None:
        """Why there is no speed, or no speed-up, where there is none."""
        if self.ran and self.steps_per_s is None:
            steps = counted(self.steps, "step")
            return f"{steps} at this number of --steps: too few to measure a speed"
        if not self.ran or self.speed_up is not None or not self.speed_ups:
            return None
        low = min(self.speed_ups)
        high = max(self.speed_ups)
        if high > SPREAD * low:
            return (
                f"speed-ups from {low:.2f}× to {high:.2f}× in {len(self.speed_ups)} comparisons "
                "are no verdict: leave the machine to this alone, or take more --steps"
            )
        return (
            f"{median(self.speed_ups):.1f}× as fast as single is more than "
            f"{counted(self.workers, 'worker')} can be: other programs hold up single"
        )

    def with_speeds(self, runs: Sequence[RunOutcome], speed_ups: Sequence[float]) -> RunOutcome:
        """With the median speed of its runs; a speed-up only where it is certain."""
        middle = median(speed_ups) if speed_ups else None
        if middle is not None and (
            max(speed_ups) > SPREAD * min(speed_ups) or middle > CREDIBLE * self.workers
        ):
            middle = None
        return replace(
            self,
            steps_per_s=_median([run.steps_per_s for run in runs]),
            cpu_s_per_step=_median([run.cpu_s_per_step for run in runs]),
            speed_up=middle,
            speed_ups=tuple(speed_ups),
        )

    def to_json(self) -> dict[str, Any]:
        is_compared = self.ran and self.single_steps is not None
        return {**asdict(self), "against_single": self.against_single if is_compared else None}


def outcome_of(
    run: ComparedRun,
    base: RunOutcome | None,
    base_losses: Sequence[float],
    until: float | None = None,
) -> RunOutcome:
    """What the reports of a run say; `base` is the run of single on one worker."""
    folder = Path(run.folder)
    reports = [r for r in RunDir(folder).read_reports(run.workers) if r is not None]
    refused = next((r["refused"] for r in reports if "refused" in r), None)
    if refused is not None:
        return RunOutcome(run.strategy, run.workers, refused=str(refused))
    if len(reports) < (1 if run.may_lose else run.workers):
        return RunOutcome(run.strategy, run.workers, failed="it wrote no report")
    return outcome_from(run, reports, read_spans(folder), base, base_losses, until)


def outcome_from(
    run: ComparedRun,
    reports: Sequence[dict[str, Any]],
    spans: Trace,
    base: RunOutcome | None,
    base_losses: Sequence[float],
    until: float | None = None,
) -> RunOutcome:
    """What a run came to, from the reports and the spans of its workers."""
    strategy = as_strategy(run.strategy)
    batches = strategy.sync_for(run.workers).batches
    evaluated = reports[0]["evaluated"]
    last = [r["losses"][-max(1, int(LAST * len(r["losses"]))) :] for r in reports if r["losses"]]
    training = _mean([fmean(losses) for losses in last])
    loss = evaluated.get("loss", training)
    rates = [r["samples_per_s"] for r in reports if r["samples_per_s"] is not None]
    paces = [r["steps_per_s"] for r in reports if r["steps_per_s"] is not None]
    has_paces = paces and batches is not Batches.IN_TURNS
    sent = [sent_bytes(run, report["sync"], report.get("group_bytes")) for report in reports]
    times = _times(spans, reports)
    speed = steps_per_s(reports, batches is Batches.IN_TURNS)
    there = {report["rank"] for report in reports}
    until_s, until_steps = _reached(reports, until)
    comparable = base and strategy.is_synchronous and strategy.reference != strategy
    comparable = comparable and len(there) == run.workers
    return RunOutcome(
        run.strategy,
        run.workers,
        steps=reports[0]["steps"],
        loss=_finite(loss),
        training_loss=_finite(training),
        first_loss=_finite(_mean([r["losses"][0] for r in reports if r["losses"]])),
        evaluated=evaluated or None,
        steps_per_s=speed,
        steps_per_s_between=(min(paces), max(paces)) if has_paces else None,
        samples_per_s=sum(rates) if rates else None,
        cpu_s_per_step=sum(r["cpu_s_per_step"] or 0.0 for r in reports) or None,
        bytes_sent=_mean([count for count in sent if count is not None]),
        computing=_mean([t.computing for t in times]),
        waiting=_mean([t.communication for t in times]),
        exposed=_mean([t.exposed for t in times]),
        idle=_mean([t.loading + t.other for t in times]),
        loss_difference=_difference(reports[0]["losses"], base_losses) if comparable else None,
        loss_gap=loss - base.loss if base and base.loss is not None and loss is not None else None,
        single_steps=base.steps if base else None,
        injected=_mean([t.injected for t in times]),
        lost=tuple(rank for rank in range(run.workers) if rank not in there),
        dropped=_dropped(reports[0]["sync"]),
        skipped=_skipped(reports),
        staleness=_mean([stale for r in reports for stale in map(_staleness, r["sync"]) if stale]),
        until_s=until_s,
        until_steps=until_steps,
    )


def _reached(reports: Sequence[dict[str, Any]], target: float | None) -> tuple[Any, Any]:
    """Seconds and steps until the mean loss over ten steps of all workers was that low."""
    steps = [zip(r["loss_s"], r["loss_steps"], r["losses"], strict=True) for r in reports]
    done = sorted(one for mine in steps for one in mine)
    window = _WINDOW * len(reports)
    for end in range(window, len(done) + 1 if target is not None else 0):
        if fmean(loss for _, _, loss in done[end - window : end]) <= (target or 0.0):
            return done[end - 1][0] - done[0][0], max(number for _, number, _ in done[:end])
    return None, None


def _dropped(syncs: Sequence[dict[str, Any]]) -> int | None:
    """Pushes that came too late, as the servers that decide about them have counted."""
    leaders = [sync["servers"][0] for sync in syncs if sync.get("servers")]
    counts = [mine for leader in leaders for mine in leader.get("workers", {}).values()]
    return sum(mine.get("dropped", 0) for mine in counts) if counts else None


def _skipped(reports: Sequence[dict[str, Any]]) -> int | None:
    """Steps of all workers; None where none can be skipped."""
    counts = [sync["skipped"] for report in reports for sync in report["sync"] if "skipped" in sync]
    return sum(counts) if counts else None


def _staleness(sync: dict[str, Any]) -> float | None:
    for name in ("steps_behind", "updates_in_between"):  # of gossip, of hogwild
        if name in sync:
            return float(sync[name])
    missed = (sync.get("servers") or [{}])[0].get("missed_updates") or {}
    pushes = sum(missed.values())
    return sum(int(number) * count for number, count in missed.items()) / pushes if pushes else None


def sent_bytes(
    run: ComparedRun, syncs: Sequence[dict[str, Any]], group_bytes: int | None
) -> float | None:
    """What one worker has sent, where it is counted.

    By the strategy that synchronizes replicas; where replicas are split, by their groups.
    """
    strategy = as_strategy(run.strategy)
    is_split = run.workers > 1 and strategy.layout(run.workers).replicas < run.workers
    counts = [sync.get("bytes_sent") for sync in syncs]
    if is_split and not strategy.sync_for(run.workers).has_servers:
        counts = [group_bytes]
    elif is_split:
        counts.append(group_bytes)
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def speed_ups(runs: Iterable[RunOutcome]) -> dict[str, list[float]]:
    """By strategy: the speed of each run over that of single, just before and just behind it.

    single is as fast as the faster one of its runs beside each other: with a thread for each core,
    and with those of a worker, of which a busy machine slows the former.
    """
    blocks = [(single, list(block)) for single, block in groupby(runs, lambda run: run.is_single)]
    found: dict[str, list[float]] = {}
    for at, (is_single, block) in enumerate(blocks):
        if is_single:
            continue
        beside = [blocks[i][1] for i in (at - 1, at + 1) if 0 <= i < len(blocks)]
        bases = [max(run.steps_per_s or 0.0 for run in singles) for singles in beside]
        for run in block:
            if run.steps_per_s and run.has_batches:
                ratios = [run.steps_per_s / base for base in bases if base]
                found.setdefault(run.strategy, []).extend(ratios)
    return found


def patience_s(single: ComparedRun) -> float | None:
    """How long another run may take; None where single has not ended."""
    report = RunDir(Path(single.folder)).read_reports(1)[0]
    wall_s = (report or {}).get("wall_s")
    return None if wall_s is None else max(_PATIENCE_S, _SLOW * float(wall_s))


def steps_per_s(reports: Sequence[dict[str, Any]], in_turns: bool) -> float | None:
    """The mean over workers. None if no worker took enough steps.

    Where workers take batches in turns, none waits for another: one that begins late is alone at
    the end. So all their steps count, over the time from the first that began to the last.
    """
    known = [report for report in reports if report["steps_per_s"] is not None]
    if not in_turns or not known:
        return _mean([report["steps_per_s"] for report in known])
    begin = min(report["measured_ns"][0] for report in known)
    end = max(report["measured_ns"][1] for report in known)
    steps = sum(report["steps_per_s"] * report["seconds"] for report in known) / len(reports)
    return float(steps / ((end - begin) / 1e9))


def losses_of(run: ComparedRun) -> list[float]:
    """The loss of every step, as rank 0 saw it."""
    report = RunDir(Path(run.folder)).read_reports(1)[0]
    return list(report["losses"]) if report and "losses" in report else []


def _times(spans: Trace, reports: Sequence[dict[str, Any]]) -> list[TimeShares]:
    """The time shares of each worker while its speed was measured."""
    arrivals = Arrivals(spans)
    return [
        time_shares(spans[report["rank"]], report["rank"], arrivals, tuple(report["measured_ns"]))
        for report in reports
        if report["measured_ns"] is not None and report["rank"] in spans
    ]


def _difference(losses: Sequence[float], base: Sequence[float]) -> float | None:
    if not base or len(losses) != len(base):
        return None
    largest = max(abs(loss) for loss in base)
    apart = max(abs(a - b) for a, b in zip(losses, base, strict=True))
    relative = apart / max(largest, 1e-300)
    return relative if math.isfinite(relative) else math.inf


def _median(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return median(known) if known else None


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
