"""`shoal.predict` and `shoal.rank_strategies`: what a step costs, and which strategy is best.

    prediction = shoal.predict("gpt-3", "ddp + tp(8) + pp(16)", workers=1024, cluster="dgx-a100")
    found = shoal.rank_strategies("train.py", workers=8, cluster="cluster.toml")
    print(found.best.strategy, found.best.why)

A model is the name of a transformer, a script, or a `Workload`: `workload_of(module, inputs)` of
`shoal.plan.tracing.module` makes one from any module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.cluster import Cluster
from shoal.cluster.units import parse_bytes
from shoal.commands.subject import Subject, named_cluster, program_on, workload_of_script
from shoal.errors import BadInput
from shoal.plan.accuracy import places
from shoal.plan.explain import in_script, nothing_fits, options_of, why
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.search import Priced, SearchOptions, SearchResult, search
from shoal.plan.workloads import Recompute, Workload
from shoal.plan.workloads.model_presets import default_batch, named_workload
from shoal.strategy.base import Term
from shoal.strategy.strategy import Strategy, as_strategy

Model = str | Path | Workload


@dataclass(frozen=True)
class PlannedStrategy:
    """One strategy of a plan. `options` are those of `shoal predict` that are not notation."""

    strategy: Strategy
    options: str
    in_script: str  # what a training script has to say beside the strategy
    prediction: Prediction
    why: str
    merged: tuple[str, ...]  # others of its layout that are neither faster nor smaller
    place: tuple[int, int]  # the first and the last that it may have, by the ranges of predictions


@dataclass(frozen=True)
class FoundPlan:
    """Strategies within memory, the best first, and what is beside them."""

    ranked: tuple[PlannedStrategy, ...]
    too_large: tuple[PlannedStrategy, ...]  # faster than the first, and larger than the memory
    asynchronous: tuple[PlannedStrategy, ...]  # with `include_async`; not one device's result
    nothing_fits: str | None  # what would be needed, where `ranked` is empty
    asked: str = ""  # why the strategy that was asked about is not the first

    @property
    def best(self) -> PlannedStrategy:
        if self.nothing_fits is not None:
            raise BadInput(self.nothing_fits)
        return self.ranked[0]


def predict(
    model: Model,
    strategy: str | Strategy | Term | None = None,
    *,
    workers: int = 1,
    cluster: str | Path | Cluster = "this-machine",
    batch: int | None = None,
    microbatch: int | None = None,
    recompute: Recompute = "none",
) -> Prediction:
    """The time of a step by its parts, and the memory by kind, without training.

    `batch` are the samples of the global batch, `microbatch` those of a micro-batch of a replica.
    """
    value = as_strategy(strategy or ("ddp" if workers > 1 else "single"))
    value.layout(workers)
    value.require_built()
    subject = _subject(model, batch, workers)
    hardware = named_cluster(cluster).of_size(workers)
    program = program_on(hardware, {})
    settings = PlanSettings(subject.batch, microbatch, recompute, program=program)
    predictor = Predictor(subject.workload, hardware)
    return predictor.predict(value, workers, settings)


def rank_strategies(
    model: Model,
    *,
    workers: int,
    cluster: str | Path | Cluster = "this-machine",
    batch: int | None = None,
    limit: str | float | None = None,
    top: int = 10,
    include_async: bool = False,
) -> FoundPlan:
    """Every valid strategy that fits the memory, ranked by predicted time, with the reasons.

    Strategies whose `place` overlaps are equal as far as predictions can tell.
    `limit` is the memory of a device where it is not the cluster's: bytes, or text such as "10GB".
    """
    subject = _subject(model, batch, workers)
    hardware = named_cluster(cluster)
    if limit is not None:
        num_bytes = float(parse_bytes(limit)) if isinstance(limit, str) else float(limit)
        hardware = hardware.with_memory(num_bytes)
    settings = PlanSettings(subject.batch, program=program_on(hardware, {}))
    options = SearchOptions(settings, top, include_async)
    return as_plan(search(subject.workload, hardware, workers, options))


def as_plan(result: SearchResult) -> FoundPlan:
    """What was found, in words."""
    return FoundPlan(
        _planned(result.ranked),
        tuple(one for each in result.too_large for one in _planned((each,))),
        _planned(result.asynchronous),
        None if result.ranked else nothing_fits(result.least, result.least_workers),
        "" if result.asked is None or not result.ranked else why(result.asked, result.ranked[0]),
    )


def _planned(found: tuple[Priced, ...]) -> tuple[PlannedStrategy, ...]:
    return tuple(
        PlannedStrategy(
            tried.strategy,
            options_of(tried.settings),
            in_script(tried.strategy, tried.settings, one.prediction.microbatches),
            one.prediction,
            why(one, found[0]),
            one.merged,
            place,
        )
        for one, place in zip(found, places([one.prediction for one in found]), strict=True)
        for tried in [one.candidate]
    )


def _subject(model: Model, batch: int | None, workers: int) -> Subject:
    if batch is not None and batch < 1:
        raise BadInput(f"a batch has at least 1 sample, not {batch}")
    workload = named_workload(str(model)) if isinstance(model, str | Path) else model
    if workload is not None:
        return Subject(workload, batch or default_batch(workload, workers))
    found = workload_of_script(str(model))
    return Subject(found.workload, batch or found.batch)
