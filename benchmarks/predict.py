"""Predicted step times against measured ones, and whether the predicted best is the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from benchmarks import predict_models
from benchmarks.harness import check_names, say
from benchmarks.spread import SpreadPredictor
from shoal.cluster import Cluster
from shoal.cluster.units import show_seconds
from shoal.commands.compare import Comparison
from shoal.commands.launching import command_for, config_for, run_quietly, strategy_for
from shoal.commands.output import plain_table
from shoal.commands.subject import workload_of_script
from shoal.errors import BadInput
from shoal.observe.comparison import ComparedRun, RunOutcome
from shoal.plan.predict import PlanSettings
from shoal.plan.prediction import Prediction
from shoal.plan.profile import profiled
from shoal.plan.workloads import Workload
from shoal.runtime.files import scratch_folder
from shoal.strategy.strategy import as_strategy
from shoal.worker.auto import measure_profile

CLOSE = 0.05  # a pick that takes so much longer than the best is as good


@dataclass(frozen=True)
class PredictedRun:
    """One strategy: seconds for a global batch, predicted and measured, with their spreads."""

    strategy: str
    workers: int
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    measured_s: float
    measured_low_s: float
    measured_high_s: float

    @property
    def error(self) -> float:
        """Above 0: predicted longer than it took."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Verdict:
    """All strategies of one model."""

    model: str
    rows: tuple[PredictedRun, ...]
    refused: tuple[tuple[str, str], ...] = ()  # (strategy, why)

    @property
    def median_error(self) -> float | None:
        return median(abs(row.error) for row in self.rows) if self.rows else None

    @property
    def picked(self) -> PredictedRun:
        return min(self.rows, key=lambda row: row.predicted_s)

    @property
    def best(self) -> PredictedRun:
        return min(self.rows, key=lambda row: row.measured_s)

    @property
    def regret(self) -> float:
        """How much longer the predicted best takes than the measured best."""
        return self.picked.measured_s / self.best.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "model": self.model,
            "strategies": [{**asdict(row), "error": row.error} for row in self.rows],
            "refused": [{"strategy": name, "why": why} for name, why in self.refused],
            "median_error": self.median_error,
        }
        if self.rows:
            document |= {
                "predicted_best": self.picked.strategy,
                "measured_best": self.best.strategy,
                "regret": self.regret,
                "is_best_or_close": self.regret <= CLOSE,
            }
        return document


def median_error(verdicts: Sequence[Verdict]) -> float | None:
    """Over all strategies of all models."""
    errors = [abs(row.error) for verdict in verdicts for row in verdict.rows]
    return median(errors) if errors else None


STRATEGIES = ("single", "ddp", "ps", 'ps(mode="async")', "gossip", "zero(2)", "pp(2)", "tp(2)")
STEPS = {"gpt": 40, "gpt-medium": 20, "gpt-large": 20, "mlp": 25, "mlp-small": 200}
_RUN_S = 3.0
SCRIPT = str(Path(predict_models.__file__))


@dataclass(frozen=True)
class PredictBench:
    """Each strategy is run `rounds` times, in turns with the others."""

    workers: int
    strategies: tuple[str, ...] = STRATEGIES
    rounds: int = 3
    device: str | None = None

    def check(self) -> list[tuple[str, int]]:
        """Notations and numbers of workers; BadInput where one cannot run."""
        found = []
        for text in self.strategies:
            alone = as_strategy(text) == as_strategy("single")
            workers = 1 if alone else self.workers
            found.append((str(strategy_for(text, workers)), workers))
        return list(dict.fromkeys(found))

    def verdict(self, model: str, cluster: Cluster) -> Verdict:
        runs = self.check()
        traced = workload_of_script(SCRIPT, ["--model", model])
        workload = traced.workload
        predictor = SpreadPredictor(workload, self._profiled(cluster, workload, model))
        settings = PlanSettings(batch=traced.batch)
        predictions = [
            predictor.predict(as_strategy(strategy), workers, settings)
            for strategy, workers in runs
        ]
        outcomes = self._measure(model, predictions)
        rows = []
        refused = []
        for prediction in predictions:
            strategy = prediction.strategy
            mine = [one for one in outcomes if one.strategy == strategy]
            seconds = [traced.batch / one.samples_per_s for one in mine if one.samples_per_s]
            if not seconds:
                refused.append((strategy, _why(mine)))
                continue
            rows.append(_compared(prediction, seconds))
        return Verdict(model, tuple(rows), tuple(refused))

    def _profiled(self, cluster: Cluster, workload: Workload, model: str) -> Cluster:
        """With the pace of the model's passes, alone and beside as many workers as are asked."""
        counts = sorted({workers for _, workers in self.check()})
        run = partial(run_quietly, command_for(SCRIPT, ["--model", model]))
        config = config_for(as_strategy("single"), device=self.device)
        profiles = [measure_profile(run, config, count) for count in counts]
        return profiled(cluster, workload, profiles)

    def _measure(self, model: str, predictions: Sequence[Prediction]) -> list[RunOutcome]:
        config = config_for(as_strategy("single"), device=self.device)
        with scratch_folder("predict") as folder:
            entries = _entries(predictions, STEPS[model], self.rounds, folder)
            words = [SCRIPT, "--model", model]
            return Comparison(words, config, groups_of(entries), folder).measure()


def groups_of(entries: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Which runs share processes: those without servers."""
    alone = [e for e in entries if as_strategy(e.strategy).sync_for(e.workers).has_servers]
    together = [entry for entry in entries if entry not in alone]
    return [group for group in (together, *([entry] for entry in alone)) if group]


def _entries(
    predictions: Sequence[Prediction], fewest: int, rounds: int, folder: Path
) -> list[ComparedRun]:
    """Runs of `fewest` steps, or of as many as take `_RUN_S`, without a trace."""
    entries = []
    for number, one in enumerate(rounds * tuple(predictions)):
        steps = max(fewest, round(_RUN_S / one.step_s))
        mine = str(folder / str(number))
        run = ComparedRun(number, one.strategy, one.workers, mine, steps, traced=False)
        entries.append(run)
    return entries


def _why(outcomes: Sequence[RunOutcome]) -> str:
    reasons = [one.refused or one.failed or one.unmeasured for one in outcomes]
    return next((reason for reason in reasons if reason), "it was not measured")


def _compared(prediction: Prediction, seconds: Sequence[float]) -> PredictedRun:
    """Seconds for a global batch; strategies that do not wait have steps of their own length."""
    batch_s = prediction.batch / prediction.samples_per_s
    scale = batch_s / prediction.step_s
    low_s, high_s = min(seconds), max(seconds)
    if len(seconds) > 2:
        low_s, _, high_s = quantiles(seconds, n=4, method="inclusive")
    return PredictedRun(
        prediction.strategy,
        prediction.workers,
        batch_s,
        prediction.low_s * scale,
        prediction.high_s * scale,
        median(seconds),
        low_s,
        high_s,
    )


def run(bench: PredictBench, models: Sequence[str], cluster: Cluster) -> Iterator[Verdict]:
    """Each model when it is done."""
    check_names("--models", models, tuple(STEPS))
    if not models:
        raise BadInput(f"--models takes {', '.join(STEPS)}")
    for model in models:
        say(f"shoal: measuring {model} on {bench.workers}")
        yield bench.verdict(model, cluster)


def document(verdicts: Sequence[Verdict], cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "models": [verdict.to_json() for verdict in verdicts],
        "median_error": median_error(verdicts),
    }


def report(verdict: Verdict) -> list[Table | str]:
    heads = ["strategy", "workers", "predicted", "(spread)", "measured", "(quartiles)", "error"]
    rows = [_row(row) for row in sorted(verdict.rows, key=lambda one: one.measured_s)]
    table = plain_table(f"{verdict.model}: time of a global batch", heads, rows, left=1)
    refused = [f"{strategy}: {why}" for strategy, why in verdict.refused]
    return [table, *refused, *([_summary(verdict), ""] if verdict.rows else [])]


def total(verdicts: Sequence[Verdict]) -> list[str]:
    error = median_error(verdicts)
    return [] if error is None else [f"median error over all: {error:.1%}"]


def _row(row: PredictedRun) -> list[str]:
    return [
        row.strategy,
        str(row.workers),
        show_seconds(row.predicted_s),
        f"({show_seconds(row.predicted_low_s)}–{show_seconds(row.predicted_high_s)})",
        show_seconds(row.measured_s),
        f"({show_seconds(row.measured_low_s)}–{show_seconds(row.measured_high_s)})",
        f"{row.error:+.1%}",
    ]


def _summary(verdict: Verdict) -> str:
    words = f"median error {verdict.median_error:.1%}; predicted best {verdict.picked.strategy}, "
    words += f"measured best {verdict.best.strategy}"
    if verdict.picked != verdict.best:
        words += f", which is {verdict.regret:.1%} faster than the predicted one"
    return words
