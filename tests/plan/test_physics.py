"""What holds of every prediction: better hardware is never slower, more work never faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.step.collective_time import Network, RankGroup
from shoal.plan.step.layer_time import KernelModel, LayerClock
from shoal.plan.workloads import Kernel, LayerCost, Split, parameters_of, product
from shoal.plan.workloads.model_presets import transformer_named
from shoal.plan.workloads.traced_workload import Line, TracedKernel, TracedLayer, TracedWorkload
from shoal.plan.workloads.transformer_block import Transformer
from shoal.schedules.collectives.cost import Link
from shoal.schedules.ring_attention import RingAttention
from shoal.strategy.strategy import parse
from tests import ring_schedule

STAGES = [f"zero({stage})" for stage in (1, 2, 3)]
LARGE = [  # 128 workers of 8 in a node
    *("ddp", *STAGES, "ps", "ps(quorum=0.9)", "ps(staleness=2)", "localsgd(every=8)"),
    *('ps(placement="workers")', 'ps(servers=4, mode="async")', 'ddp(compress="int8")'),
    *(
        'gossip(graph="ring")',
        'gossip(graph="torus")',
        "zero(3) + cp(4)",
        "zero(1) + cp(2) + tp(4)",
    ),
    *("ddp + tp(8)", "ddp + tp(8, sequence=True)", "ddp + tp(8) + pp(4)"),
    'zero(1) + tp(2) + pp(4, schedule="zb-h1", microbatches=8)',
    'ddp + pp(8, schedule="interleaved", chunks=2, microbatches=8)',
    *("zero(1) + ep(8)", "ddp + ep(4) + pp(2)"),
]
DENSE = "layers=16,hidden=1024,heads=16,vocab=5120"
RACKS = replace(load_cluster("dgx-h100"), nodes=16, nodes_per_rack=8, oversubscription=2)
CLUSTERS = {128: RACKS, 16: load_cluster("ethernet-25").of_size(16)}  # by workers


def predicted(cluster: Cluster, text: str, workers: int, sequence: int = 1024) -> Prediction:
    sizes = f"{DENSE},experts=8,top_k=2" if "ep(" in text else DENSE
    model = transformer_named(f"{sizes},sequence={sequence}")
    return Predictor(model, cluster).predict(parse(text), workers, PlanSettings(256))


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    links = {name: getattr(cluster.node, name) for name in ("fabric", "pcie", "nic", "socket_link")}
    faster = {
        name: replace(link, bytes_per_s=factor * link.bytes_per_s)
        for name, link in links.items()
        if link is not None
    }
    return replace(cluster, node=replace(cluster.node, **faster))


def faster_memory(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    bus = cluster.node.memory_bytes_per_s
    node = replace(cluster.node, memory_bytes_per_s=factor * bus if bus else None)
    quick = replace(device, memory_bytes_per_s=factor * device.memory_bytes_per_s)
    return replace(cluster, device=quick, node=node)


def wider_uplinks(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, oversubscription=max(1.0, cluster.oversubscription / factor))


def runs(workers: int, text: str) -> bool:
    """16 single devices have no room for some of the splits of 128."""
    try:
        parse(text).layout(workers)
    except BadInput:
        return False
    return True


CASES = [(workers, text) for workers in CLUSTERS for text in LARGE if runs(workers, text)]
cases = st.sampled_from(CASES)


@pytest.mark.parametrize("faster", [faster_links, faster_memory, wider_uplinks])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases, factor=st.floats(1.05, 20), ratio=st.floats(1, 64))
def test_what_is_faster_is_never_slower(
    faster: Callable[[Cluster, float], Cluster], case: tuple[int, str], factor: float, ratio: float
) -> None:
    workers, text = case
    cluster = CLUSTERS[workers]
    if faster is wider_uplinks:
        cluster = replace(cluster, oversubscription=ratio)
    worse, better = (predicted(one, text, workers) for one in (cluster, faster(cluster, factor)))
    assert better.step_s <= worse.step_s * (1 + 1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.sampled_from([64, 128, 256, 512]), st.integers(2, 8))
def test_longer_sequences_are_never_faster(
    case: tuple[int, str], sequence: int, factor: int
) -> None:
    workers, text = case
    better, worse = (
        predicted(CLUSTERS[workers], text, workers, long) for long in (sequence, sequence * factor)
    )
    assert better.step_s <= worse.step_s * (1 + 1e-9)
    assert better.memory.total <= worse.memory.total


@pytest.mark.parametrize(("workers", "text"), CASES)
def test_every_part_is_plausible(workers: int, text: str) -> None:
    found = predicted(CLUSTERS[workers], text, workers)
    assert all(part.seconds >= 0 for part in found.parts)
    assert found.step_s == pytest.approx(sum(part.seconds for part in found.parts))
    assert found.mfu is not None and 0 < found.mfu <= 1
    assert min(found.memory) >= 0
    alone = predicted(CLUSTERS[workers], "single", 1)
    assert alone.step_s <= workers * found.step_s * 1.02  # no speed-up above the number of workers


def test_less_sharding_never_takes_less_memory() -> None:
    stages = [predicted(RACKS, text, 128).memory for text in ("ddp", *STAGES)]
    totals = [memory.total - memory.activations for memory in stages]
    assert totals == sorted(totals, reverse=True)


GPU = Device("gpu", 80e9, 2e12, {"fp16": 1e14, "fp32": 1e14})
MODEL = transformer_named("layers=4,hidden=1024,heads=8,kv_heads=2,vocab=1000,sequence=32768")
MIXTURE = transformer_named("layers=4,hidden=1024,heads=8,vocab=1000,experts=8,top_k=2")
SPARSE = PlanSettings(8, flash_attention=True)


def cluster(bytes_per_s: float) -> Cluster:
    return Cluster("one node", GPU, Node(8, LinkSpec("fabric", bytes_per_s, 1e-6)))


def parts(model: object, text: str, bytes_per_s: float, settings: PlanSettings = SPARSE) -> dict:
    found: Prediction = Predictor(model, cluster(bytes_per_s)).predict(parse(text), 8, settings)
    return {part.name: part.seconds for part in found.parts}


@pytest.mark.parametrize("bytes_per_s", [100e9, 20e9, 2e9])
@pytest.mark.parametrize("text", ["cp(8)", "tp(2) + cp(4)", "ddp + cp(2)", "zero(3)"])
def test_slower_launches_make_nothing_faster(text: str, bytes_per_s: float) -> None:
    times = []
    for launch_s in (0.0, 1e-6, 1e-5, 1e-4, 1e-3):
        there = cluster(bytes_per_s)
        there = replace(there, device=replace(GPU, launch_s=launch_s))
        times.append(Predictor(MODEL, there).predict(parse(text), 8, SPARSE).step_s)
    assert times == sorted(times)


@pytest.mark.parametrize("bytes_per_s", [1e12, 20e9, 1e9])
@pytest.mark.parametrize("ranks", [2, 8])
def test_attention_under_cp_takes_what_the_schedule_of_the_ring_takes(
    ranks: int, bytes_per_s: float
) -> None:
    network = Network(cluster(bytes_per_s))
    one = RankGroup(1, 1)
    split = Split(cp=ranks, flash_attention=True)
    cost = MODEL.cost(1, split)
    attention = tuple(kernel for kernel in cost.forward if kernel.name == "attention")
    computing_s = KernelModel(GPU, "fp16").time(attention).seconds
    clock = LayerClock(MODEL, network)
    (message,) = cost.forward_messages
    sent_s = clock._messages((message,), (one, RankGroup(ranks, 1), one), KernelModel(GPU, "fp16"))[
        1
    ].seconds
    block_bytes = 2 * 2 * 32768 / ranks * 2 * 128  # K and V in fp16, 2 heads of 128
    pair_s = computing_s / (2 * ranks)
    link = Link(1e-6, 1 / bytes_per_s)
    expected = ring_schedule.time_s(RingAttention(ranks), block_bytes, pair_s, link)
    assert computing_s + sent_s == pytest.approx(expected, rel=1e-3)


def test_a_slower_link_exposes_the_ring_and_a_fast_one_hides_it() -> None:
    assert "cp" not in parts(MODEL, "cp(8)", 1e12)
    assert parts(MODEL, "cp(8)", 1e8)["cp"] > parts(MODEL, "cp(8)", 1e9)["cp"] > 0


@pytest.mark.parametrize("bytes_per_s", [1e12, 1e10, 1e9])
@pytest.mark.parametrize(
    ("text", "axis", "microbatches"),
    [
        ("tp(8, sequence=True)", "tp", 4),
        ("ep(8)", "ep", 1),
        ("ep(8)", "ep", 4),
        ("pp(4) + tp(2)", "pp", 8),
    ],
)
def test_computing_hides_at_most_its_own_time(
    text: str, axis: str, microbatches: int, bytes_per_s: float
) -> None:
    """Nothing is hidden of the one micro-batch of ep, nor of the first and last sends of pp."""
    samples = 8 * microbatches if axis == "ep" else microbatches
    settings = PlanSettings(samples, microbatch=1)
    shown = parts(MIXTURE, text, bytes_per_s, settings)
    hidden = parts(MIXTURE, text, bytes_per_s, replace(settings, hide=(axis,)))
    saved_s = shown[axis] - hidden[axis]
    computing_s = shown["forward"] + shown["backward"] + (shown["tp"] if axis == "pp" else 0.0)
    least = 0.0 if microbatches == 1 else 0.1 * min(shown[axis], computing_s)
    assert least <= saved_s <= min(shown[axis], computing_s) * 1.0001
    assert microbatches > 1 or saved_s == pytest.approx(0.0)


def test_communication_beside_kernels_makes_them_longer() -> None:
    settings = PlanSettings(8, microbatch=1, hide=("tp",))
    there = cluster(1e11)
    slow = replace(there, device=replace(GPU, overlap_cost=0.5))
    fast_s, slow_s, shown_s = (
        Predictor(MIXTURE, on).predict(parse("tp(8, sequence=True)"), 8, asked).step_s
        for on, asked in ((there, settings), (slow, settings), (slow, replace(settings, hide=())))
    )
    assert fast_s < slow_s < shown_s


@pytest.mark.parametrize("text", ["ddp", "zero(2)", "zero(3)", "tp(8, sequence=True)"])
@pytest.mark.parametrize(("bytes_per_s", "is_slower"), [(1e6, False), (1e11, True)])
def test_kernels_that_end_before_what_they_hide_may_be_slower(
    text: str, bytes_per_s: float, is_slower: bool
) -> None:
    """Beside a slow network computing has time; beside a fast one the step gets longer."""
    there = cluster(bytes_per_s)
    slow = replace(there, device=replace(GPU, overlap_cost=0.2))
    asked = PlanSettings(8, hide=("tp",) if "tp" in text else ())
    free_s, slow_s = (
        Predictor(MIXTURE, on).predict(parse(text), 8, asked).step_s for on in (there, slow)
    )
    assert (slow_s > free_s * 1.000001) == is_slower


@pytest.mark.parametrize(("name", "is_scaled"), [("up", True), ("scores", False)])
def test_operands_of_fp8_products_are_scaled(name: str, is_scaled: bool) -> None:
    """A pass over both, which reads 2 bytes a number and writes one; attention stays bf16."""
    device = replace(GPU, peak_flops={**GPU.peak_flops, "fp8": 4e14, "bf16": 2e14})
    (_, plain_s), (_, moved_s) = (
        KernelModel(device, kind).busy(product(name, 4096, 1024, 2048, 2))
        for kind in ("bf16", "fp8")
    )
    pass_s = 3 * 2048 * (4096 + 1024) / device.memory_bytes_per_s
    assert moved_s - plain_s == pytest.approx(pass_s * is_scaled)


def test_a_token_goes_once_to_each_of_its_groups_of_experts() -> None:
    limited = transformer_named("layers=4,hidden=1024,heads=8,vocab=1000,experts=8,top_k=2")
    limited = replace(limited, sizes=replace(limited.sizes, token_groups=1))
    message = {m.bytes for m in MIXTURE.cost(1, Split(ep=8)).forward_messages}
    assert {2 * m.bytes for m in limited.cost(1, Split(ep=8)).forward_messages} == message


def test_experts_that_tp_does_not_divide_compute_as_much_and_send_less() -> None:
    cost, folded = (MIXTURE.cost(1, Split(tp=2, ep=4, fold_ep=one)) for one in (False, True))
    flops = [sum(k.flops for k in one.forward if "experts" in k.name) for one in (cost, folded)]
    sent = [sum(m.bytes for m in one.forward_messages if m.axis == "ep") for one in (cost, folded)]
    assert flops[0] == flops[1] and sent[0] == 2 * sent[1]
    assert cost.expert_parameters == folded.expert_parameters
    widths = [{k.n for k in one.forward if k.name == "experts up"} for one in (cost, folded)]
    assert widths[0] != widths[1]


def test_a_group_of_small_products_takes_longer_than_one_of_all() -> None:
    kernels = KernelModel(load_cluster("dgx-h100").device, "bf16")
    group = product("experts up", 64, 1024, 1024, 2, 16)
    one = product("up", 16 * 64, 1024, 1024, 2)
    assert group.flops == one.flops and kernels.busy_s([group]) > 1.3 * kernels.busy_s([one])


def test_parallel_attention_and_mlp_have_one_sum_and_one_norm() -> None:
    together = replace(MODEL, sizes=replace(MODEL.sizes, parallel=True))
    apart, one = (model.cost(1, Split(tp=2)) for model in (MODEL, together))
    assert (len(apart.forward_messages), len(one.forward_messages)) == (2, 1)
    assert [k.name for k in apart.forward].count("norm") == 2
    assert [k.name for k in one.forward].count("norm") == 1


@pytest.mark.parametrize(
    ("model", "text", "ranks", "experts"),
    [(MODEL, "ddp + cp(4)", 4, 0), (MIXTURE, "ep(8)", 8, 4 * 8 * 2 * 1024 * 4096)],
)
def test_workers_of_cp_and_ep_sum_the_gradients_of_all_but_experts(
    model: Transformer, text: str, ranks: int, experts: int
) -> None:
    summed = 2 * (parameters_of(model) - experts)
    expected = Network(cluster(1e10)).collective("all_reduce", RankGroup(ranks, 1), summed)
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


def parts_of(model: str, strategy: str, workers: int, settings: PlanSettings) -> dict[str, float]:
    predictor = Predictor(transformer_named(model), load_cluster("dgx-h100").of_size(workers))
    found = predictor.predict(parse(strategy), workers, settings)
    return {part.name: part.seconds for part in found.parts}


def test_gpus_add_gradients_of_micro_batches_where_replicas_do_not_reduce_each() -> None:
    """Of mixed precision two passes of 2 bytes read and one writes, but in the first one."""
    model = "layers=16,hidden=1024,heads=16,precision=bf16"
    two, five = (parts_of(model, "ddp", 8, PlanSettings(n * 8, 1))["accumulate"] for n in (2, 5))
    device = load_cluster("dgx-h100").device
    moved = 6 * parameters_of(transformer_named(model))
    passed_s = moved / (device.memory_bytes_per_s * device.memory_efficiency.at(moved))
    assert two == pytest.approx(passed_s) and five == pytest.approx(4 * passed_s)
    for strategy, given_settings in {
        "ddp": PlanSettings(8, 1),
        "zero(2)": PlanSettings(40, 1),
        "zero(1)": PlanSettings(40, 1, fused_adding=True),
    }.items():
        assert "accumulate" not in parts_of(model, strategy, 8, given_settings)


def test_a_call_has_a_time_beside_its_messages() -> None:
    cluster = load_cluster("dgx-h100")
    slow = replace(cluster, device=replace(cluster.device, call_s=cluster.device.call_s + 1))
    for kind, more_s in {"all_reduce": 1, "all_gather": 1, "all_to_all": 1, "send": 0}.items():
        took = [Network(one).collective(kind, RankGroup(8, 1), 1e6) for one in (cluster, slow)]
        assert took[1].seconds - took[0].seconds == pytest.approx(more_s)


def test_fp8_is_of_products_with_weights_alone() -> None:
    """Twice as fast; attention of a long sequence stays as it is."""
    kernels = KernelModel(load_cluster("dgx-h100").device, "fp8")
    wide = KernelModel(load_cluster("dgx-h100").device, "bf16")
    for name, faster in {
        "qkv": 2,
        "up weight gradient": 2,
        "attention backward": 1,
        "logits": 1,
    }.items():
        kernel = Kernel(name, 1e12, 1e6)
        ratio = wide.busy_s([kernel]) / kernels.busy_s([kernel])
        assert ratio == pytest.approx(faster, rel=1e-3), name


def test_shared_experts_are_dense_layers_of_every_worker() -> None:
    sizes = f"{DENSE},experts=8,top_k=2,gated=yes"
    plain, shared = (transformer_named(f"{sizes}{more}") for more in ("", ",shared_experts=1"))
    one = 3 * 1024 * 4096
    assert parameters_of(shared) - parameters_of(plain) == pytest.approx(16 * one)
    costs = [model.cost(1, Split(ep=8)) for model in (plain, shared)]
    assert costs[1].expert_parameters == costs[0].expert_parameters
    assert costs[1].parameters - costs[0].parameters == pytest.approx(one)
    more = [sum(kernel.flops for kernel in cost.forward) for cost in costs]
    assert more[1] - more[0] == pytest.approx(2 * one * plain.sizes.sequence)
