"""cp and ep are priced as the runtime does them: rings of keys and values, sums, all-to-alls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.step.collective_time import Network, RankGroup
from shoal.plan.step.layer_time import KernelModel, LayerClock
from shoal.plan.workloads import Kernel, LayerCost, Split
from shoal.plan.workloads.model_presets import transformer_named
from shoal.plan.workloads.traced_workload import Line, TracedKernel, TracedLayer, TracedWorkload
from shoal.plan.workloads.transformer_block import Transformer
from shoal.schedules.collectives.cost import Link
from shoal.schedules.ring_attention import RingAttention
from shoal.strategy.strategy import parse

GPU = Device("gpu", 80e9, 2e12, {"fp16": 1e14, "fp32": 1e14})
MODEL = transformer_named("layers=4,hidden=1024,heads=8,kv_heads=2,vocab=1000,sequence=32768")
MIXTURE = transformer_named("layers=4,hidden=1024,heads=8,vocab=1000,experts=8,top_k=2")
SPARSE = PlanSettings(8, flash_attention=True)


def cluster(bytes_per_s: float) -> Cluster:
    return Cluster("one node", GPU, Node(8, LinkSpec("fabric", bytes_per_s, 1e-6)))


def parts(model: object, text: str, bytes_per_s: float, settings: PlanSettings = SPARSE) -> dict:
    found: Prediction = Predictor(model, cluster(bytes_per_s)).predict(parse(text), 8, settings)
    return {part.name: part.seconds for part in found.parts}


@pytest.mark.parametrize("bytes_per_s", [1e12, 20e9, 1e9])
@pytest.mark.parametrize("ranks", [2, 8])
def test_attention_under_cp_takes_what_the_schedule_of_the_ring_takes(
    ranks: int, bytes_per_s: float
) -> None:
    network = Network(cluster(bytes_per_s))
    one = RankGroup(1, 1)
    split = Split(cp=ranks, flash_attention=True)
    cost = MODEL.cost(1, split)
    attention = [kernel for kernel in cost.forward if kernel.name == "attention"]
    computing_s = KernelModel(GPU, "fp16").time(attention).seconds
    clock = LayerClock(MODEL, network)
    (message,) = cost.forward_messages
    sent_s = clock._messages((message,), (one, RankGroup(ranks, 1), one))[1].seconds
    block_bytes = 2 * 2 * 32768 / ranks * 2 * 128  # K and V in fp16, 2 heads of 128
    pair_s = computing_s / (2 * ranks)
    link = Link(1e-6, 1 / bytes_per_s)
    expected = RingAttention(ranks).time_s(block_bytes, pair_s, link)
    assert computing_s + sent_s == pytest.approx(expected, rel=1e-3)


def test_a_slower_link_exposes_the_ring_and_a_fast_one_hides_it() -> None:
    assert "cp" not in parts(MODEL, "cp(8)", 1e12)
    assert parts(MODEL, "cp(8)", 1e8)["cp"] > parts(MODEL, "cp(8)", 1e9)["cp"] > 0


@pytest.mark.parametrize(
    ("model", "text", "ranks", "experts"),
    [(MODEL, "ddp + cp(4)", 4, 0), (MIXTURE, "ep(8)", 8, 4 * 8 * 2 * 1024 * 4096)],
)
def test_workers_of_cp_and_ep_sum_the_gradients_of_all_but_experts(
    model: Transformer, text: str, ranks: int, experts: int
) -> None:
    whole = sum(run.count * model.cost(i, Split()).parameters for i, run in enumerate(model.runs))
    group = RankGroup(ranks, 1)
    expected = Network(cluster(1e10)).collective("all_reduce", group, 2 * (whole - experts))
    axis = "cp" if experts == 0 else "ep"
    assert parts(model, text, 1e10)[f"{axis} gradients"] == pytest.approx(expected.seconds)


def test_tokens_go_to_their_experts_and_back_in_both_directions() -> None:
    """A worker has a sample of 2048 tokens, each with two experts: four all-to-alls a layer."""
    sent = 2 * 2048 * 1024 * 2
    one = Network(cluster(1e10)).collective("all_to_all", RankGroup(8, 1), sent)
    assert parts(MIXTURE, "ep(8)", 1e10)["ep"] == pytest.approx(4 * 4 * one.seconds)


def test_ring_attention_keeps_no_scores_and_skips_chunks_that_are_masked() -> None:
    ring = MODEL.cost(1, Split(cp=2))
    scores = flops_of(MODEL.cost(1, Split()), "scores")
    assert flops_of(ring, "scores") == pytest.approx(scores / 2 * 5 / 8)
    flash = MODEL.cost(1, Split(cp=2, flash_attention=True))
    assert ring.activation_bytes == flash.activation_bytes
    encoder = replace(MODEL, sizes=replace(MODEL.sizes, causal=False)).cost(1, Split(cp=2))
    assert flops_of(encoder, "scores") == pytest.approx(scores / 2)


def test_attention_under_cp_is_a_kernel_a_round_and_sums_of_their_results() -> None:
    ring, whole = (MODEL.cost(1, Split(cp=cp, flash_attention=True)) for cp in (8, 1))
    names = [kernel.name for kernel in ring.forward]
    assert (names.count("attention"), names.count("sum of rounds")) == (8, 7)
    assert flops_of(ring, "attention") == pytest.approx(flops_of(whole, "attention") / 8)


def flops_of(cost: LayerCost, name: str) -> float:
    return sum(kernel.flops for kernel in cost.forward if kernel.name == name)


def test_the_attention_of_a_traced_model_sends_its_keys_and_values_round() -> None:
    kernels = [Kernel("attention", 1e9 * n, 1e6 * n, 512, 512, 64, 8 * n) for n in (1, 2)]
    layer = TracedLayer("block", (TracedKernel(*kernels, "forward"),), (), Line(1e9, 2e9))
    traced = TracedWorkload("traced", replace(MODEL.precision, compute="fp32"), (1, 2), (layer,))
    (message,) = traced.cost(0, Split(2, cp=2)).forward_messages
    assert message.bytes == 4 * 2 * 2 * 8 * 512 * 64  # K and V of two samples with 8 heads
    assert not traced.cost(0, Split(2)).forward_messages
