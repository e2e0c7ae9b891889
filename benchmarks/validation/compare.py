"""Hold predictions against measured steps: errors, order, and what a wrong choice would cost.

With `folds` the constants of the cluster are fitted to all rows but those of one fold, which are
then predicted, in turn: no row has a part in its own prediction.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.validation.fit import AMPERE, BOUNDS, EAGER, Fitted, fit
from benchmarks.validation.measured import TimedRow
from shoal.cluster import Cluster
from shoal.cluster.hardware import Device
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.step.collective_time import MEGATRON_ORDER
from shoal.plan.sync_price import Zero3
from shoal.plan.workloads import Precision, Split
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
from shoal.strategy.strategy import Strategy, as_strategy

MEGATRON = Precision("fp16", 2, 4, 4, 8)  # gradients are summed in fp32: 18 bytes a parameter
POINTWISE = ("norm", "add", "activation", "rotary")
_WAYS = ("", " backward")
_EAGER_FACTOR = 3.2  # where a cluster has none: fitted to published tables
_AMPERE_FACTOR = 5.0  # the same, of the highest efficiency of products
_MOST_ROWS = 200  # of a fit of about ten constants
OnFit = Callable[[int, int, float], None]  # which fit of how many, and its error so far
_MICROBATCHES = (1, 2, 4, 8, 16)  # tried where a table does not say


@dataclass(frozen=True)
class RunsAs:
    """How the measured runs differ from Shoal's: the defaults are those of Megatron-LM."""

    order: tuple[str, ...] = MEGATRON_ORDER
    overlap: bool = False
    even_stages: bool = True
    scatter_sends: bool = True
    precision: Precision = MEGATRON
    flash_attention: bool = False
    bucket_mb: float | None = 1e6  # gradients are one buffer; None: as Shoal's ddp
    zero3_of: Zero3 = "shoal"
    nics: tuple[int, float] | None = None  # of a node, Gb/s each; None: as the cluster has them
    fused_adding: bool = True  # of gradients of micro-batches, inside of the products
    sends_in_turn: bool = False  # a stage sends to another, and then receives from it
    waits_a_layer: int = 0  # of the host for the device, in a layer's forward and backward
    blocks: bool = False  # the host waits for every kernel: CUDA_LAUNCH_BLOCKING=1
    memory_gb_per_s: float | None = None  # of the GPU; None: as the cluster has it
    ampere_attention: bool = False  # kernels do per unit and clock what they do on an A100
    eager: tuple[str, ...] = ()  # kernels that are not fused
    hide: tuple[str, ...] = ()  # of tp, ep and pp: whose messages computing hides

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with the network and the kernels that the runs had."""
        device = cluster.device
        factors = dict(device.kernel_factors)
        slow = factors.get(EAGER, _EAGER_FACTOR)
        factors |= {f"{name}{way}": slow for name in self.eager for way in _WAYS}
        if self.ampere_attention:
            highest = device.matmul_efficiency.points[-1][1]
            slow = highest * factors.get(AMPERE, _AMPERE_FACTOR)
            factors |= {f"attention{way}": slow for way in _WAYS}
        rate = (self.memory_gb_per_s or 0) * 1e9 or device.memory_bytes_per_s
        device = replace(device, kernel_factors=factors, memory_bytes_per_s=rate)
        cluster = replace(cluster, device=device)
        if self.nics is None or cluster.node.nic is None:
            return cluster
        nic = replace(cluster.node.nic, bytes_per_s=self.nics[1] * 1e9 / 8)
        return replace(cluster, node=replace(cluster.node, nics=self.nics[0], nic=nic))


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
    fitted: Fitted | None  # on all rows
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
            "fitted": self.fitted.values if self.fitted else {},
            "bounds": {name: BOUNDS[name] for name in self.fitted.values} if self.fitted else {},
            "at_bound": self.fitted.at_bound if self.fitted else {},
            "in_sample_error": self.in_sample_error,
            "folds": self.folds,
        }


def validate(
    rows: Sequence[TimedRow],
    cluster: Cluster,
    runs_as: RunsAs,
    folds: int = 0,
    on_fit: OnFit = lambda fit, of, error: None,
) -> Validation:
    """Predict every row; with `folds` (2 or more) after fitting to the rows of the other folds."""
    table = PricedTable(rows, runs_as)
    if not folds:
        return _validation(rows, table.predict(cluster), cluster)
    if not 2 <= folds <= len(rows):
        raise BadInput(f"folds={folds} must be 2 or more, and at most the {len(rows)} rows")
    predicted = [0.0] * len(rows)
    for fold in range(folds):
        kept = [n for n in range(len(rows)) if _fold(n, folds) != fold]
        held = [n for n in range(len(rows)) if _fold(n, folds) == fold]
        fitted = _fit(cluster, table.some(kept), partial(on_fit, fold + 1, folds + 1))
        for n, value in zip(held, table.some(held).predict(fitted.cluster), strict=True):
            predicted[n] = value
    whole = _fit(cluster, table, partial(on_fit, folds + 1, folds + 1))
    inside = _validation(rows, table.predict(whole.cluster), whole.cluster)
    return _validation(rows, predicted, whole.cluster, whole, inside.mean_absolute_error, folds)


def _fit(cluster: Cluster, table: PricedTable, on_error: Callable[[float], None]) -> Fitted:
    """A fit to the rows; of many, to some from all over the table, which say as much."""
    count = min(len(table.rows), _MOST_ROWS)
    taken = table.some([n * len(table.rows) // count for n in range(count)])
    return fit(cluster, [row.seconds for row in taken.rows], taken.predict, on_error=on_error)


def _fold(index: int, folds: int) -> int:
    """Folds in an order that follows no column of a sorted table."""
    return (index * 2654435761 % 2**32) // 65536 % folds


class PricedTable:
    """Rows of measured runs, ready to be predicted on one cluster after the other.

    What a row says without a cluster is read once.
    """

    def __init__(self, rows: Sequence[TimedRow], runs_as: RunsAs):
        self.rows = list(rows)
        self._runs_as = runs_as
        self._models = {
            row.sizes: Transformer(name_of(row.sizes), row.sizes, runs_as.precision) for row in rows
        }
        strategies = {text: self._strategy(text) for text in {row.strategy for row in rows}}
        self._asked = [(strategies[row.strategy], self._all_settings(row)) for row in rows]

    def some(self, indices: Sequence[int]) -> PricedTable:
        """The rows of these indices."""
        taken = copy.copy(self)
        taken.rows = [self.rows[n] for n in indices]
        taken._asked = [self._asked[n] for n in indices]
        return taken

    def predict(self, cluster: Cluster) -> list[float]:
        """Seconds of every row."""
        return [one.step_s for one in self.predictions(cluster)]

    def predictions(self, cluster: Cluster) -> list[Prediction]:
        there = self._runs_as.on(cluster).of_size(
            max((row.workers for row in self.rows), default=1)
        )
        predictors = {
            sizes: Predictor(self._models[sizes], there, self._runs_as.order)
            for sizes in {row.sizes for row in self.rows}
        }
        found = [
            _best_that_fits([predictors[row.sizes].predict(strategy, row.workers, s) for s in each])
            for row, (strategy, each) in zip(self.rows, self._asked, strict=True)
        ]
        return [
            replace(one, step_s=one.step_s + self._more_s(cluster.device, row, strategy, one))
            for one, row, (strategy, _) in zip(found, self.rows, self._asked, strict=True)
        ]

    def _more_s(self, device: Device, row: TimedRow, strategy: Strategy, one: Prediction) -> float:
        """What a program loses that waits where Shoal and Megatron-LM do not."""
        runs_as = self._runs_as
        sends_s = sum(part.seconds for part in one.parts if part.name == "pp")
        waits_s = runs_as.waits_a_layer * device.wait_s
        if runs_as.blocks:
            layer = self._models[row.sizes].cost(1, Split(recompute=row.recompute))
            backward = (*layer.backward_input, *layer.backward_weight)
            kernels = (*layer.forward, *layer.recompute, *backward)
            waits_s += len(kernels) * device.launch_s
        return runs_as.sends_in_turn * sends_s + waits_s * _layers_in_turn(row, strategy, one)

    def _strategy(self, text: str) -> Strategy:
        bucket_mb = self._runs_as.bucket_mb
        if bucket_mb is None or not re.match(r"ddp\b(?!\()", text):
            return as_strategy(text)
        return as_strategy(text.replace("ddp", f"ddp(bucket_mb={bucket_mb:.0f})", 1))

    def _all_settings(self, row: TimedRow) -> list[PlanSettings]:
        """One for every micro-batch that the row may have had."""
        sizes: list[int | None] = [row.microbatch]
        if row.microbatch is None:
            sizes = [b for b in _MICROBATCHES if b == 1 or row.batch % (b * row.dp) == 0]
        return [self._settings(row, size) for size in sizes]

    def _settings(self, row: TimedRow, microbatch: int | None) -> PlanSettings:
        runs_as = self._runs_as
        return PlanSettings(
            row.batch,
            microbatch,
            row.recompute,
            runs_as.flash_attention,
            runs_as.overlap,
            runs_as.even_stages,
            runs_as.scatter_sends,
            runs_as.zero3_of,
            runs_as.fused_adding,
            runs_as.hide,
        )


def _layers_in_turn(row: TimedRow, strategy: Strategy, one: Prediction) -> float:
    """Of a stage: all its micro-batches, and those that it waits for."""
    stages = strategy.layout(row.workers).pp
    return row.sizes.layers / stages * (one.microbatches + stages - 1)


def _best_that_fits(found: Sequence[Prediction]) -> Prediction:
    fitting = [one for one in found if one.fits]
    return min(fitting or found, key=lambda one: one.step_s)


def name_of(sizes: TransformerSizes) -> str:
    return f"{sizes.layers} layers of {sizes.hidden}"


def _validation(
    rows: Sequence[TimedRow],
    predicted: Sequence[float],
    cluster: Cluster,
    fitted: Fitted | None = None,
    in_sample_error: float | None = None,
    folds: int = 0,
) -> Validation:
    compared = tuple(
        Compared(row.line, row.strategy, row.workers, row.seconds, seconds)
        for row, seconds in zip(rows, predicted, strict=True)
    )
    return Validation(compared, _regrets(rows, compared), fitted, in_sample_error, folds, cluster)


def _regrets(rows: Sequence[TimedRow], compared: Sequence[Compared]) -> tuple[Regret, ...]:
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
