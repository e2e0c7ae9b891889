"""Hold predictions against measured steps: errors, order, and what a wrong choice would cost.

With `folds` the constants of the cluster are fitted to all rows but those of one fold, which are
then predicted, in turn: no row has a part in its own prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.cluster.cluster import Cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.step.rank_order import IN_MEGATRONS_ORDER, RankOrder
from shoal.plan.validation.fit import Fitted, fit
from shoal.plan.validation.measured import MeasuredRow
from shoal.plan.workloads.transformer import Transformer, TransformerSizes
from shoal.plan.workloads.workload import Precision
from shoal.strategy.strategy import Strategy, as_strategy

MEGATRON = Precision("fp16", 2, 4, 4, 8)  # gradients are summed in fp32: 18 bytes a parameter
_MOST_ROWS = 200  # of a fit of about ten constants
_MICROBATCHES = (1, 2, 4, 8, 16)  # tried where a table does not say


@dataclass(frozen=True)
class RunsAs:
    """How the measured runs differ from Shoal's: the defaults are those of Megatron-LM."""

    order: RankOrder = IN_MEGATRONS_ORDER
    overlap: bool = False
    even_stages: bool = True
    scatter_sends: bool = True
    precision: Precision = MEGATRON
    flash_attention: bool = False


@dataclass(frozen=True)
class Compared:
    line: int
    strategy: str
    workers: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Regret:
    """One model on one number of workers: the plan that would have been picked, and the best."""

    model: str
    workers: int
    plans: int
    picked: str
    best: str
    regret: float  # how much longer the picked plan takes, measured


@dataclass(frozen=True)
class Validation:
    rows: tuple[Compared, ...]
    regrets: tuple[Regret, ...]
    fitted: dict[str, float]  # on all rows; empty: nothing was fitted
    in_sample_error: float | None
    folds: int
    cluster: Cluster  # the one given, or with the constants fitted on all rows

    @property
    def mean_absolute_error(self) -> float:
        return statistics.fmean(abs(row.error) for row in self.rows)

    @property
    def bias(self) -> float:
        return statistics.fmean(row.error for row in self.rows)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's."""
        measured = _ranks([row.measured_s for row in self.rows])
        predicted = _ranks([row.predicted_s for row in self.rows])
        if len(set(measured)) < 2 or len(set(predicted)) < 2:
            return None
        return statistics.correlation(measured, predicted)

    @property
    def regret(self) -> float | None:
        return statistics.fmean(one.regret for one in self.regrets) if self.regrets else None

    def worst(self, number: int) -> list[Compared]:
        return sorted(self.rows, key=lambda row: -abs(row.error))[:number]

    def as_dict(self) -> dict[str, object]:
        return {
            "rows": [asdict(row) | {"error": row.error} for row in self.rows],
            "mean_absolute_error": self.mean_absolute_error,
            "bias": self.bias,
            "rank_correlation": self.rank_correlation,
            "regret": self.regret,
            "regrets": [asdict(one) for one in self.regrets],
            "fitted": self.fitted,
            "in_sample_error": self.in_sample_error,
            "folds": self.folds,
        }


def validate(
    rows: Sequence[MeasuredRow], cluster: Cluster, runs_as: RunsAs, folds: int = 0
) -> Validation:
    """Predict every row; with `folds` (2 or more) after fitting to the rows of the other folds."""
    table = PricedTable(rows, runs_as)
    if not folds:
        return _validation(rows, table.predict(cluster), cluster)
    if not 2 <= folds <= len(rows):
        raise BadInput(f"folds={folds} must be 2 or more, and at most the {len(rows)} rows")
    predicted = [0.0] * len(rows)
    for fold in range(folds):
        kept = [row for n, row in enumerate(rows) if _fold(n, folds) != fold]
        held = [n for n in range(len(rows)) if _fold(n, folds) == fold]
        fitted = _fit(cluster, kept, runs_as)
        seconds = PricedTable([rows[n] for n in held], runs_as).predict(fitted.cluster)
        for n, value in zip(held, seconds, strict=True):
            predicted[n] = value
    whole = _fit(cluster, rows, runs_as)
    inside = _validation(rows, table.predict(whole.cluster), whole.cluster)
    return _validation(
        rows, predicted, whole.cluster, whole.values, inside.mean_absolute_error, folds
    )


def _fit(cluster: Cluster, rows: Sequence[MeasuredRow], runs_as: RunsAs) -> Fitted:
    """A fit to the rows; of many, to some from all over the table, which say as much."""
    count = min(len(rows), _MOST_ROWS)
    taken = [rows[n * len(rows) // count] for n in range(count)]
    return fit(cluster, [row.seconds for row in taken], PricedTable(taken, runs_as).predict)


def _fold(index: int, folds: int) -> int:
    """Folds in an order that follows no column of a sorted table."""
    return (index * 2654435761 % 2**32) // 65536 % folds


class PricedTable:
    """Rows of measured runs, ready to be predicted on one cluster after the other."""

    def __init__(self, rows: Sequence[MeasuredRow], runs_as: RunsAs):
        self._runs_as = runs_as
        self._rows = [(row, as_strategy(row.strategy)) for row in rows]
        self._most = max(row.workers for row in rows)
        self._models = {
            row.sizes: Transformer(name_of(row.sizes), row.sizes, runs_as.precision) for row in rows
        }

    def predict(self, cluster: Cluster) -> list[float]:
        """Seconds of every row."""
        return [one.step_s for one in self.predictions(cluster)]

    def predictions(self, cluster: Cluster) -> list[Prediction]:
        there = cluster.of_size(self._most)
        predictors = {
            sizes: Predictor(model, there, self._runs_as.order)
            for sizes, model in self._models.items()
        }
        return [self._one(predictors[row.sizes], row, strategy) for row, strategy in self._rows]

    def _one(self, predictor: Predictor, row: MeasuredRow, strategy: Strategy) -> Prediction:
        sizes = [row.microbatch]
        if row.microbatch is None:
            sizes = [b for b in _MICROBATCHES if b == 1 or row.batch % (b * row.dp) == 0]
        found = [predictor.predict(strategy, row.workers, self._settings(row, b)) for b in sizes]
        fitting = [one for one in found if one.fits]
        return min(fitting or found, key=lambda one: one.step_s)

    def _settings(self, row: MeasuredRow, microbatch: int | None) -> PlanSettings:
        runs_as = self._runs_as
        return PlanSettings(
            row.batch,
            microbatch,
            row.recompute,
            runs_as.flash_attention,
            runs_as.overlap,
            runs_as.even_stages,
            runs_as.scatter_sends,
        )


def name_of(sizes: TransformerSizes) -> str:
    return f"{sizes.layers} layers of {sizes.hidden}"


def _validation(
    rows: Sequence[MeasuredRow],
    predicted: Sequence[float],
    cluster: Cluster,
    fitted: dict[str, float] | None = None,
    in_sample_error: float | None = None,
    folds: int = 0,
) -> Validation:
    compared = tuple(
        Compared(row.line, row.strategy, row.workers, row.seconds, seconds)
        for row, seconds in zip(rows, predicted, strict=True)
    )
    return Validation(
        compared, _regrets(rows, compared), fitted or {}, in_sample_error, folds, cluster
    )


def _regrets(rows: Sequence[MeasuredRow], compared: Sequence[Compared]) -> tuple[Regret, ...]:
    groups: dict[tuple[object, ...], list[Compared]] = {}
    models = {}
    for row, one in zip(rows, compared, strict=True):
        groups.setdefault(row.question, []).append(one)
        models[row.question] = name_of(row.sizes)
    found = []
    for question, plans in groups.items():
        if len(plans) < 2:
            continue
        picked = min(plans, key=lambda plan: plan.predicted_s)
        best = min(plans, key=lambda plan: plan.measured_s)
        regret = picked.measured_s / best.measured_s - 1
        found.append(
            Regret(
                models[question], picked.workers, len(plans), picked.strategy, best.strategy, regret
            )
        )
    return tuple(found)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the middle one."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and math.isclose(
            values[order[end + 1]], values[order[start]], rel_tol=1e-12
        ):
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2
        start = end + 1
    return ranks
