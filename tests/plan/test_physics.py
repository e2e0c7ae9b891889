"""What holds of every prediction: better hardware is never slower, more work never faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse

LARGE = [  # 128 workers of 8 in a node
    "ddp",
    "zero(1)",
    "zero(2)",
    "zero(3)",
    "ps",
    'ps(placement="workers")',
    'ps(servers=4, mode="async")',
    "ps(quorum=0.9)",
    "ps(staleness=2)",
    'gossip(graph="ring")',
    'gossip(graph="torus")',
    "localsgd(every=8)",
    'ddp(compress="int8")',
    "ddp + tp(8)",
    "ddp + tp(8, sequence=True)",
    "ddp + tp(8) + pp(4)",
    'zero(1) + tp(2) + pp(4, schedule="zb-h1", microbatches=8)',
    'ddp + pp(8, schedule="interleaved", chunks=2, microbatches=8)',
    "zero(3) + cp(4)",
    "zero(1) + cp(2) + tp(4)",
]
MIXED = ["zero(1) + ep(8)", "ddp + ep(4) + pp(2)"]
DENSE = "layers=16,hidden=1024,heads=16,vocab=5120,sequence=1024"
MIXTURE = f"{DENSE},experts=8,top_k=2"
BATCH = 256


def presets() -> dict[str, Cluster]:
    racks = replace(load_cluster("dgx-h100"), nodes=16, nodes_per_rack=8, oversubscription=2)
    return {"dgx-h100": racks, "ethernet-25": load_cluster("ethernet-25").of_size(16)}


CLUSTERS = presets()
WORKERS = {"dgx-h100": 128, "ethernet-25": 16}


def predicted(cluster: Cluster, text: str, workers: int, sequence: int = 1024) -> Prediction:
    sizes = MIXTURE if "ep(" in text else DENSE
    model = transformer_named(sizes.replace("sequence=1024", f"sequence={sequence}"))
    return Predictor(model, cluster).predict(parse(text), workers, PlanSettings(BATCH))


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    def faster(link: LinkSpec | None) -> LinkSpec | None:
        return None if link is None else replace(link, bytes_per_s=factor * link.bytes_per_s)

    node = cluster.node
    links = {name: faster(getattr(node, name)) for name in ("fabric", "pcie", "nic", "socket_link")}
    return replace(cluster, node=replace(node, **links))


def faster_memory(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    bus = cluster.node.memory_bytes_per_s
    node = replace(cluster.node, memory_bytes_per_s=factor * bus if bus else None)
    quick = replace(device, memory_bytes_per_s=factor * device.memory_bytes_per_s)
    return replace(cluster, device=quick, node=node)


def runs(name: str, text: str) -> bool:
    """16 single devices have no room for some of the splits of 128."""
    layout = parse(text).layout
    try:
        layout(WORKERS[name])
    except BadInput:
        return False
    return True


CASES = [(name, text) for name in WORKERS for text in (*LARGE, *MIXED) if runs(name, text)]
cases = st.sampled_from(CASES)
factors = st.floats(1.05, 20)


def check_never_faster(better: Prediction, worse: Prediction) -> None:
    assert better.step_s <= worse.step_s * (1 + 1e-9)


@pytest.mark.parametrize("faster", [faster_links, faster_memory])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases, factor=factors)
def test_what_is_faster_is_never_slower(
    faster: Callable[[Cluster, float], Cluster], case: tuple[str, str], factor: float
) -> None:
    name, text = case
    cluster = CLUSTERS[name]
    plain = predicted(cluster, text, WORKERS[name])
    check_never_faster(predicted(faster(cluster, factor), text, WORKERS[name]), plain)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([*LARGE, *MIXED]), st.floats(1, 16), st.floats(1, 4))
def test_more_oversubscription_is_never_faster(text: str, less: float, factor: float) -> None:
    cluster = replace(CLUSTERS["dgx-h100"], oversubscription=less)
    better = predicted(cluster, text, 128)
    check_never_faster(
        better, predicted(replace(cluster, oversubscription=less * factor), text, 128)
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases, st.sampled_from([64, 128, 256, 512]), st.integers(2, 8))
def test_longer_sequences_are_never_faster(
    case: tuple[str, str], sequence: int, factor: int
) -> None:
    name, text = case
    better = predicted(CLUSTERS[name], text, WORKERS[name], sequence)
    worse = predicted(CLUSTERS[name], text, WORKERS[name], sequence * factor)
    check_never_faster(better, worse)
    assert better.memory.total <= worse.memory.total


@pytest.mark.parametrize(("name", "text"), CASES)
def test_every_part_is_plausible(name: str, text: str) -> None:
    workers = WORKERS[name]
    found = predicted(CLUSTERS[name], text, workers)
    assert all(part.seconds >= 0 for part in found.parts)
    assert found.step_s == pytest.approx(sum(part.seconds for part in found.parts))
    assert found.mfu is not None and 0 < found.mfu <= 1
    assert min(vars(found.memory).values()) >= 0
    alone = predicted(CLUSTERS[name], "single", 1)
    assert alone.step_s <= workers * found.step_s * 1.02  # no speed-up above the number of workers


def test_less_sharding_never_takes_less_memory() -> None:
    cluster = CLUSTERS["dgx-h100"]
    stages = [predicted(cluster, text, 128).memory for text in LARGE[:4]]
    totals = [memory.total - memory.activations for memory in stages]
    assert totals == sorted(totals, reverse=True)
