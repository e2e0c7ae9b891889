"""The search finds what pricing everything finds, and says why."""

from __future__ import annotations

import pytest

import shoal
from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.plan.candidates import candidate, divisors, layouts, pipelines, shapes, syncs
from shoal.plan.explain import nothing_fits, options_of, why
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.search import SearchOptions, SearchResult, search
from shoal.plan.workloads.transformer import Transformer, TransformerSizes
from shoal.strategy.strategy import parse

MODEL = Transformer("small", TransformerSizes(layers=4, hidden=1024, heads=4, sequence=512))
BATCH = PlanSettings(batch=16)


def cluster(memory_gb: float, devices: int = 2) -> Cluster:
    device = Device("gpu", memory_gb * 1e9, 1e12, {"fp16": 1e14}, launch_s=1e-6)
    fabric = LinkSpec("fabric", 100e9, 1e-6)
    nic = LinkSpec("nic", 10e9, 5e-6)
    return Cluster("two by two", device, Node(devices, fabric, nic=nic), nodes=2)


def found(memory_gb: float, workers: int = 4, **options: bool) -> SearchResult:
    return search(MODEL, cluster(memory_gb), workers, SearchOptions(BATCH, **options))


def fastest_of_all(memory_gb: float, workers: int) -> float:
    """The least time of everything that fits, each of them priced."""
    predictor = Predictor(MODEL, cluster(memory_gb))
    times = []
    for layout in layouts(MODEL, workers, BATCH.batch):
        for shape in shapes(layout, MODEL.limits, BATCH):
            for sync in syncs(layout, cluster(memory_gb), workers, True):
                for pipeline in pipelines(shape, 6):
                    for recompute in ("none", "selective", "full"):
                        tried = candidate(shape, sync, pipeline, recompute, BATCH)
                        priced = predictor.predict(tried.strategy, workers, tried.settings)
                        if priced.fits:
                            times.append(priced.step_s)
    return min(times)


@pytest.mark.parametrize("memory_gb", [80, 1.0])
def test_the_search_is_as_good_as_pricing_everything(memory_gb: float) -> None:
    best = found(memory_gb).ranked[0]
    assert best.seconds == pytest.approx(fastest_of_all(memory_gb, 4), rel=0.002)
    assert best.prediction.memory.total <= memory_gb * 1e9


def test_the_notation_of_a_ranked_strategy_gives_its_prediction() -> None:
    for one in found(80).ranked:
        value = parse(str(one.candidate.strategy))
        value.require_built()
        again = Predictor(MODEL, cluster(80)).predict(value, 4, one.candidate.settings)
        assert again == one.prediction


def test_of_one_layout_none_is_slower_and_larger_than_another() -> None:
    ranked = found(80).ranked
    for one in ranked:
        for other in ranked:
            same = one is not other and one.layout == other.layout
            slower = one.seconds > other.seconds * 1.002
            larger = one.prediction.memory.total > other.prediction.memory.total
            assert not (same and slower and larger)


def test_strategies_that_do_not_equal_one_device_are_listed_apart() -> None:
    result = found(80, include_async=True)
    assert all(one.candidate.strategy.is_synchronous for one in result.ranked)
    assert not any(one.candidate.strategy.is_synchronous for one in result.asynchronous)
    assert not found(80).asynchronous


def test_where_nothing_fits_the_fewest_workers_that_do_are_named() -> None:
    result = found(0.3, workers=1)
    assert not result.ranked
    assert result.least_workers is not None and result.least_workers.prediction.fits
    sentence = nothing_fits(result.least, result.least_workers)
    assert sentence.startswith("nothing fits 300 MB on 1 workers: the least is ")
    assert f"; with {result.least_workers.prediction.workers} workers " in sentence


def test_every_ranked_strategy_has_a_sentence() -> None:
    ranked = found(80).ranked
    assert "of the step is forward and backward" in why(ranked[0], ranked[0])
    for one in ranked[1:]:
        assert why(one, ranked[0])


def test_what_is_not_in_the_notation_is_an_option() -> None:
    settings = PlanSettings(16, microbatch=2, recompute="selective")
    assert options_of(settings) == "--microbatch 2 --recompute selective"


def test_only_notation_leaves_no_option_but_the_whole_batch_of_a_replica() -> None:
    options = SearchOptions(BATCH, notation_only=True)
    for one in search(MODEL, cluster(80), 4, options).ranked:
        assert one.candidate.settings.recompute == "none"
        samples = -(-16 // (one.layout.replicas * one.layout.ep))
        assert one.candidate.settings.microbatch in (None, samples)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


def test_shoal_plan_and_predict_in_python() -> None:
    found_plan = shoal.plan(MODEL, workers=4, cluster=cluster(80), batch=16)
    best = found_plan.best
    assert best.strategy == found(80).ranked[0].candidate.strategy and best.why
    again = shoal.predict(MODEL, "ddp", workers=4, cluster=cluster(80), batch=16)
    assert again.step_s >= best.prediction.step_s
    with pytest.raises(shoal.BadInput, match="nothing fits 1 MB on 4 workers"):
        _ = shoal.plan(MODEL, workers=4, cluster=cluster(80), batch=16, limit="1MB").best
