"""The search finds what pricing everything finds, and says why."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import shoal
from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.errors import BadInput
from shoal.plan.accuracy import DENSE, LOCAL, MEASURED, RANGES, kind_of, places, what_was_seen
from shoal.plan.candidates import candidate, layouts, pipelines, shapes, syncs
from shoal.plan.explain import does_not_fit, in_script, nothing_fits, smaller_micro_batches, why
from shoal.plan.predict import PlanSettings, Predictor, resolve_step
from shoal.plan.prediction import DeviceMemory, Prediction
from shoal.plan.search import SearchOptions, SearchResult, plainest_first, search
from shoal.plan.step.collective_time import RankGroup
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
from shoal.strategy.strategy import parse

MODEL = Transformer("small", TransformerSizes(layers=4, hidden=1024, heads=4, sequence=512))
BATCH = PlanSettings(batch=16)
WAYS = ("none", "selective", "full")  # of recompute
PARAMETERS = 51200 * 1024 + 4 * 12 * 1024 * 1024


def cluster(memory_gb: float, devices: int = 2) -> Cluster:
    device = Device("gpu", memory_gb * 1e9, 1e12, {"fp16": 1e14}, launch_s=1e-6)
    fabric = LinkSpec("fabric", 100e9, 1e-6)
    nic = LinkSpec("nic", 10e9, 5e-6)
    pcie = LinkSpec("pcie", 25e9, 1e-6)
    return Cluster("two by two", device, Node(devices, fabric, pcie=pcie, nic=nic), nodes=2)


def found(memory_gb: float, workers: int = 4, **options: bool) -> SearchResult:
    return search(MODEL, cluster(memory_gb), workers, SearchOptions(BATCH, **options))


def fastest_of_all(memory_gb: float, workers: int) -> float:
    """The least time of everything that fits, each of them priced."""
    predictor = Predictor(MODEL, cluster(memory_gb))
    times = []
    for layout in layouts(MODEL, workers, BATCH.batch):
        ways = syncs(layout, workers <= cluster(memory_gb).node.devices, True)
        for shape, sync in itertools.product(shapes(layout, MODEL, BATCH), ways):
            for pipeline, recompute in itertools.product(pipelines(shape, 6), WAYS):
                tried = candidate(shape, sync, pipeline, recompute, BATCH)
                priced = predictor.predict(tried.strategy, workers, tried.settings)
                times += [priced.step_s] if priced.fits else []
    return min(times)


@pytest.mark.parametrize("memory_gb", [80, 1.0])
def test_the_search_is_as_good_as_pricing_everything(memory_gb: float) -> None:
    ranked = found(memory_gb).ranked
    fastest_s = fastest_of_all(memory_gb, 4)
    assert min(one.seconds for one in ranked) == pytest.approx(fastest_s, rel=0.002)
    assert ranked[0].seconds <= 1.02 * fastest_s
    assert ranked[0].prediction.memory.total <= memory_gb * 1e9


def test_of_equally_fast_strategies_the_plainest_is_the_first() -> None:
    one = found(80).ranked[0]
    times_s = {"zero + tp(2)": 8.04, "zero": 8.05, "ddp": 8.06, "single": 9.0}
    priced = [
        replace(
            one,
            candidate=one.candidate._replace(strategy=parse(text)),
            prediction=replace(one.prediction, step_s=seconds),
        )
        for text, seconds in times_s.items()
    ]
    ranked = [str(found.candidate.strategy) for found in plainest_first(priced)]
    assert (ranked[0], ranked[-1]) == ("ddp", "single")
    assert "faster than the first, which is plainer" in why(priced[0], priced[2])


def predicted(step_s: float, low: float = 0.9, high: float = 1.2) -> Prediction:
    one = found(80).ranked[0].prediction
    return replace(one, step_s=step_s, low_s=low * step_s, high_s=high * step_s)


def test_plans_inside_the_range_of_each_other_are_not_ranked_apart() -> None:
    times = [predicted(seconds) for seconds in (1.0, 1.05, 1.25, 2.0)]
    assert places(times) == [(1, 2), (1, 3), (2, 3), (4, 4)]
    for (one, a), (other, b) in itertools.permutations(zip(times, places(times), strict=True), 2):
        if one.low_s <= other.step_s <= one.high_s:
            assert a[0] <= b[1] and b[0] <= a[1]
    sure, unsure = predicted(1.1, 1.0, 1.0), predicted(1.0, 0.9, 2.0)
    assert places([sure, unsure]) == [(1, 2), (1, 2)]


def test_ranges_are_those_of_published_runs_but_for_measured_machines() -> None:
    def between(hardware: Cluster, text: str, workers: int) -> tuple[float, float]:
        one = Predictor(MODEL, hardware).predict(parse(text), workers, BATCH)
        return round(one.low_s / one.step_s, 2), round(one.high_s / one.step_s, 2)

    exact = cluster(80)
    seen = replace(exact, device=replace(exact.device, name="A100-80GB"))
    low, high = RANGES[DENSE, "16 bits"]
    assert between(seen, "zero(3)", 4) == (round(low, 2), round(high, 2))
    unknown = between(exact, "zero(3)", 4)
    assert unknown[0] < low and unknown[1] > high
    assert not what_was_seen(seen.device, kind_of(MODEL, seen.device), 4)
    words = what_was_seen(exact.device, kind_of(MODEL, exact.device), 4)
    assert "no run like this was seen, a dense transformer in 16 bits on" in words
    assert "the nearest are a dense transformer in 16 bits on A100 (Megatron-LM" in words
    measured = replace(exact, device=replace(exact.device, source="measured"))
    assert between(measured, "single", 1) == MEASURED
    assert between(measured, "zero(3)", 4) == unknown  # what is between them was not measured
    paced = replace(exact, device=replace(exact.device, forward_pace=1.1))
    assert between(paced, "zero(3)", 4) == LOCAL["profiled"]
    cores = replace(exact, device=replace(exact.device, synchronous=True))
    assert between(cores, "single", 1) == LOCAL["described"]
    assert all(low < 1 < high for low, high in LOCAL.values())


def test_a_plan_that_is_a_little_too_large_is_a_near_miss() -> None:
    one = found(80).ranked[0].prediction
    for size, words in ((1.03, "a near miss, 3.0% too large"), (1.2, "does not fit")):
        limited = replace(one, memory_limit_bytes=one.memory.total / size)
        assert does_not_fit(limited, BATCH).startswith(words)


def test_what_does_not_fit_is_not_told_to_do_what_it_does() -> None:
    one = replace(found(80).ranked[0].prediction, microbatches=1, batch=64)
    large = replace(one, memory=DeviceMemory(activations=1e15))
    full, single = replace(BATCH, recompute="full"), replace(BATCH, microbatch=1)
    assert "--recompute full or --microbatch 1 keeps fewer" in does_not_fit(large, BATCH)
    assert "; --microbatch 1 keeps fewer" in does_not_fit(large, full)
    assert "; --recompute full keeps fewer" in does_not_fit(large, single)
    both = replace(full, microbatch=1)
    assert "keeps fewer" not in does_not_fit(large, both)


def test_of_one_layout_none_is_slower_and_larger_than_another() -> None:
    for one, other in itertools.permutations(found(80).ranked, 2):
        slower = one.seconds > other.seconds * 1.002
        larger = one.prediction.memory.total > other.prediction.memory.total
        assert not (one.layout == other.layout and slower and larger)


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
    assert f"; with {result.least_workers.prediction.workers} workers " in sentence


def test_micro_batches_without_a_pipeline_keep_activations_of_one_and_synchronize_once() -> None:
    predictor = Predictor(MODEL, cluster(80))
    whole = predictor.predict(parse("ddp"), 2, BATCH)
    parts = predictor.predict(parse("ddp"), 2, replace(BATCH, microbatch=2))
    assert (whole.microbatches, parts.microbatches) == (1, 4)
    assert parts.memory.activations == pytest.approx(whole.memory.activations / 4, rel=0.01)
    assert parts.memory.gradients >= whole.memory.gradients
    sent = {part.name: part.seconds for part in parts.parts}
    once = {part.name: part.seconds for part in whole.parts}
    most = predictor.pricer(2).network.collective("all_reduce", RankGroup(2, 1), 2 * PARAMETERS)
    assert once["gradients"] <= sent["gradients"] < 1.1 * most.seconds


def test_a_script_that_accumulates_has_the_micro_batches_that_it_asks_for() -> None:
    script = TracedWorkload("script", MODEL.precision, (1, 2), (), accumulate=4)
    assert resolve_step(script, parse("ddp"), 2, BATCH)[2] == 4
    assert resolve_step(script, parse("pp(2)"), 2, BATCH)[2] == 4
    assert resolve_step(MODEL, parse("pp(2)"), 2, BATCH)[2] == 4  # two for each stage
    assert resolve_step(MODEL, parse("ddp"), 2, BATCH)[2] == 1
    assert resolve_step(script, parse("pp(2, microbatches=8)"), 2, BATCH)[2] == 8
    in_turns = resolve_step(MODEL, parse("hogwild"), 2, BATCH)  # each replica a whole batch
    assert in_turns.split.microbatch * in_turns.microbatches == BATCH.batch


def test_selective_recompute_of_a_traced_model_is_refused_and_not_tried() -> None:
    traced = TracedWorkload("script", MODEL.precision, (1, 2), ())
    for asked in ("selective", "norm,activation"):
        with pytest.raises(BadInput, match=f"--recompute {asked} is for transformers by name"):
            resolve_step(traced, parse("ddp"), 2, replace(BATCH, recompute=asked))
    assert resolve_step(MODEL, parse("ddp"), 2, replace(BATCH, recompute="selective"))


def test_a_plan_says_what_the_script_has_to_ask_for() -> None:
    asked = replace(BATCH, microbatch=2, recompute="full")
    assert in_script(parse("ddp"), asked, 4) == (
        "in the script: job.step(…, accumulate=4) and torch.utils.checkpoint of the blocks"
    )
    assert in_script(parse("pp(2)"), BATCH, 4) == ""


def test_where_a_batch_does_not_fit_the_largest_micro_batch_that_does_is_named() -> None:
    predictor = Predictor(MODEL, cluster(2.5))
    whole = predictor.predict(parse("ddp"), 2, BATCH)
    advice = smaller_micro_batches(predictor, parse("ddp"), whole, BATCH)
    assert not whole.fits
    size = int(advice.split()[2])
    assert advice.startswith(f"with --microbatch {size} it fits: ")
    assert f"job.step(…, accumulate={8 // size})" in advice
    assert predictor.predict(parse("ddp"), 2, replace(BATCH, microbatch=size)).fits
    assert not predictor.predict(parse("ddp"), 2, replace(BATCH, microbatch=2 * size)).fits


def test_only_notation_leaves_no_option_but_the_whole_batch_of_a_replica() -> None:
    options = SearchOptions(BATCH, notation_only=True)
    for one in search(MODEL, cluster(80), 4, options).ranked:
        assert one.candidate.settings.recompute == "none"
        samples = -(-16 // (one.layout.replicas * one.layout.ep))
        assert one.candidate.settings.microbatch in (None, samples)


def test_strategies_are_ranked_and_predicted_in_python() -> None:
    found_plan = shoal.rank_strategies(MODEL, workers=4, cluster=cluster(80), batch=16)
    best = found_plan.best
    assert best.strategy == found(80).ranked[0].candidate.strategy and best.why
    again = shoal.predict(MODEL, "ddp", workers=4, cluster=cluster(80), batch=16)
    assert again.step_s >= best.prediction.step_s
    with pytest.raises(shoal.BadInput, match="nothing fits 1 MB on 4 workers"):
        _ = shoal.rank_strategies(MODEL, workers=4, cluster=cluster(80), batch=16, limit="1MB").best
