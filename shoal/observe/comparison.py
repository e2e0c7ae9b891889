"""The results of one script under several strategies, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.observe.time_shares import TimeShares, time_shares_within
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import read_spans
from shoal.runtime.wording import counted
from shoal.strategy.base import Batches
from shoal.strategy.strategy import as_strategy

LAST = 0.1  # the fraction of steps at the end that the final training loss is a mean over
EQUAL = 0.01  # of the largest loss: more than rounding changes it


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    number: int
    strategy: str
    workers: int
    folder: str
    steps: int | None = None  # after which it is stopped; None: as many as all others
    traced: bool = True  # spans take time, too: without them there is no idle time


@dataclass(frozen=True)
class RunOutcome:
    """The result of one run, for machines; None where it is not known.

    `loss` is the latest of job.evaluate, if its metric has a "loss", else the training loss: the
    mean over the last tenth of the steps and all workers. `bytes_sent` is the mean over workers
    of what each sent in the whole run. Speeds and fractions of
    time (`computing`, `waiting` for others, `idle`: the rest) leave out the first fifth of the
    steps, and are means over workers (`samples_per_s`: the sum). `speed_up` is steps_per_s over
    that of single.
    `loss_difference` is the largest difference to the loss of the same step of single, relative
    to the largest loss, where a strategy promises the same. `loss_gap` is loss minus single's,
    `single_steps` the steps after which single had its own.
    """

    strategy: str
    workers: int
    refused: str | None = None
    failed: str | None = None
    steps: int = 0
    loss: float | None = None
    training_loss: float | None = None
    first_loss: float | None = None
    evaluated: dict[str, float] | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    speed_up: float | None = None
    bytes_sent: float | None = None
    computing: float | None = None
    waiting: float | None = None
    idle: float | None = None
    loss_difference: float | None = None
    loss_gap: float | None = None
    single_steps: int | None = None

    @property
    def ran(self) -> bool:
        return self.refused is None and self.failed is None

    @property
    def against_single(self) -> str:
        """The difference to single, or what was measured where a strategy promises none."""
        if self.loss_difference is not None:
            is_equal = self.loss_difference <= EQUAL
            shown = f"{self.loss_difference:.0e}" if is_equal else f"{self.loss_difference:.1%}"
            return f"equal ({shown})" if is_equal else f"differs by {shown}"
        if self.loss is None:
            return "the loss is not a finite number"
        is_as_long = self.single_steps in (None, self.steps)
        words = f"loss {self.loss:.3f}"
        words += "" if is_as_long else f" after {counted(self.steps, 'step')}"
        first, last = self.first_loss, self.training_loss
        if first is not None and last is not None and last >= first:
            words += f", at the start {first:.3f}"
        if self.loss_gap is not None:
            words += f", single {self.loss - self.loss_gap:.3f}"
        return words if is_as_long else f"{words} after {self.single_steps}"

    @property
    def unmeasured(self) -> str | None:
        """Why there is no speed, where there is none."""
        if not self.ran or self.steps_per_s is not None:
            return None
        steps = counted(self.steps, "step")
        return f"{steps} at this number of --steps: too few to measure a speed"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "against_single": self.against_single if self.ran else None}


def outcome_of(
    run: ComparedRun, base: RunOutcome | None, base_losses: Sequence[float]
) -> RunOutcome:
    """What the reports of a run say; `base` is the run of single on one worker."""
    reports = [r for r in RunDir(Path(run.folder)).read_reports(run.workers) if r is not None]
    refused = next((r["refused"] for r in reports if "refused" in r), None)
    if refused is not None:
        return RunOutcome(run.strategy, run.workers, refused=str(refused))
    if len(reports) < run.workers:
        return RunOutcome(run.strategy, run.workers, failed="it wrote no report")
    strategy = as_strategy(run.strategy)
    batches = strategy.sync_for(run.workers).batches
    evaluated = reports[0]["evaluated"]
    last = [r["losses"][-max(1, int(LAST * len(r["losses"]))) :] for r in reports if r["losses"]]
    training = _mean([fmean(losses) for losses in last])
    loss = evaluated.get("loss", training)
    rates = [r["samples_per_s"] for r in reports if r["samples_per_s"] is not None]
    counts = [[sync.get("bytes_sent") for sync in report["sync"]] for report in reports]
    sent = [sum(numbers) for numbers in counts if None not in numbers]  # if the strategy counts
    times = _times(Path(run.folder), reports)
    speed = steps_per_s(reports, batches is Batches.IN_TURNS)
    speed_up = speed / base.steps_per_s if base and base.steps_per_s and speed else None
    if batches is Batches.WHOLE_DATASET:
        speed_up = None  # a step is of the whole dataset
    comparable = base and strategy.is_synchronous and strategy.reference != strategy
    return RunOutcome(
        run.strategy,
        run.workers,
        steps=reports[0]["steps"],
        loss=_finite(loss),
        training_loss=_finite(training),
        first_loss=_finite(_mean([r["losses"][0] for r in reports if r["losses"]])),
        evaluated=evaluated or None,
        steps_per_s=speed,
        samples_per_s=sum(rates) if rates else None,
        speed_up=speed_up if base else 1.0,
        bytes_sent=_mean(sent),
        computing=_mean([t.computing for t in times]),
        waiting=_mean([t.exposed for t in times]),
        idle=_mean([t.idle for t in times]),
        loss_difference=_difference(reports[0]["losses"], base_losses) if comparable else None,
        loss_gap=loss - base.loss if base and base.loss is not None and loss is not None else None,
        single_steps=base.steps if base else None,
    )


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


def _times(folder: Path, reports: Sequence[dict[str, Any]]) -> list[TimeShares]:
    """The time shares of each worker while its speed was measured."""
    spans = read_spans(folder)
    return [
        time_shares_within(spans[report["rank"]], *report["measured_ns"])
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


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
