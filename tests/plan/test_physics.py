"""What holds of every prediction: better hardware is never slower, more work never faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse

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
    assert min(vars(found.memory).values()) >= 0
    alone = predicted(CLUSTERS[workers], "single", 1)
    assert alone.step_s <= workers * found.step_s * 1.02  # no speed-up above the number of workers


def test_less_sharding_never_takes_less_memory() -> None:
    stages = [predicted(RACKS, text, 128).memory for text in ("ddp", *STAGES)]
    totals = [memory.total - memory.activations for memory in stages]
    assert totals == sorted(totals, reverse=True)
