"""zero(…, offload=True): what the planner takes it to hold and to cost, beside measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shoal
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.commands.planning import FoundPlan
from shoal.errors import BadInput
from shoal.plan.explain import does_not_fit
from shoal.plan.predict import PlanSettings
from shoal.plan.prediction import Prediction
from shoal.plan.workloads import parameters_of
from shoal.plan.workloads.model_presets import named_workload

H200 = load_cluster("h200")
SMALL, LARGE = "gpt-2", "gpt-2-large"


def predicted(
    text: str, model: str = LARGE, hardware: Cluster = H200, workers: int = 1, **options: int
) -> Prediction:
    given = {"workers": workers, "batch": 8 * workers, **options}
    return shoal.predict(model, text, cluster=hardware, **given)  # type: ignore[arg-type]


def parameters(model: str) -> float:
    workload = named_workload(model)
    assert workload is not None
    return parameters_of(workload)


def offload_s(one: Prediction) -> float:
    return sum(part.seconds for part in one.parts if part.name == "offload")


def planned(hardware: Cluster, limit: str = "141GB") -> FoundPlan:
    return shoal.rank_strategies(LARGE, workers=1, cluster=hardware, batch=8, limit=limit)


@pytest.mark.parametrize(
    ("model", "stage", "added_ms"),
    [("gpt-2", 1, 16), ("gpt-2", 2, 27), ("gpt-2-large", 1, 111), ("gpt-2-large", 2, 161)],
)
def test_the_link_adds_what_was_measured(model: str, stage: int, added_ms: float) -> None:
    """One H200, 8 x 1,024, AdamW: milliseconds beyond those of single."""
    offloaded = predicted(f"zero({stage}, offload=True)", model)
    added_s = offloaded.step_s - predicted("single", model).step_s
    assert added_s == pytest.approx(offload_s(offloaded))
    assert added_s == pytest.approx(added_ms / 1000, rel=0.15)
    bounds = [part.bound for part in offloaded.parts if part.name == "offload"]
    assert bounds == ["PCIe 5.0 x16 (435 Gb/s = 54.4 GB/s)"]


@pytest.mark.parametrize(("stage", "width"), [(1, 8), (2, 12), (3, 16)])
def test_state_gradients_and_parameters_lie_in_the_hosts_memory(stage: int, width: int) -> None:
    memory = predicted(f"zero({stage}, offload=True)").memory
    assert memory.host == pytest.approx(width * parameters(LARGE), rel=0.01)
    assert memory.optimizer < 0.4 * 8 * parameters(LARGE)  # of chunks that are updated
    assert memory.total < predicted("single").memory.total


def test_replicas_divide_what_lies_there_and_what_the_link_carries() -> None:
    cluster = load_cluster("dgx-a100")
    text = "zero(2, offload=True)"
    alone, four = (predicted(text, hardware=cluster, workers=n) for n in (1, 4))
    assert four.memory.host == pytest.approx(alone.memory.host / 4, rel=0.3)  # whole parameters
    assert cluster.node.memory_bytes is not None
    assert four.host_limit_bytes == cluster.node.memory_bytes / 4
    assert offload_s(four) < 0.4 * offload_s(alone)


def test_a_gradient_goes_down_in_every_micro_batch_beside_backward() -> None:
    text = "zero(2, offload=True)"
    whole, short = (offload_s(predicted(text, microbatch=n)) for n in (8, 1))
    assert short > 1.5 * whole  # a backward of one sample does not hide it


def test_a_plan_offloads_what_does_not_fit_otherwise_and_says_what_that_costs() -> None:
    assert str(planned(H200).best.strategy) == "single"
    found = planned(H200, "9GB")
    assert all("offload" in str(one.strategy) for one in found.ranked)
    assert "offload over PCIe 5.0 x16" in found.best.why
    assert found.best.prediction.memory.total <= 9e9


def test_the_hosts_memory_is_a_limit_where_the_cluster_says_it() -> None:
    def limited(num_bytes: float) -> Cluster:
        return replace(H200, node=replace(H200.node, memory_bytes=num_bytes)).with_memory(9e9)

    one = predicted("zero(3, offload=True)", hardware=limited(5e9))
    assert not one.fits
    words = does_not_fit(one, PlanSettings(8))
    assert "12.4 GB in the host's memory, which has 5 GB for a worker" in words
    assert "in the host's memory" in (planned(limited(5e9), "9GB").nothing_fits or "")
    assert planned(limited(50e9), "9GB").ranked


def test_a_cluster_without_a_link_to_its_hosts_is_refused() -> None:
    bare = replace(H200, node=replace(H200.node, pcie=None))
    with pytest.raises(BadInput, match="offload needs pcie, the link to the host: h200 has none"):
        predicted("zero(2, offload=True)", hardware=bare)
    assert planned(bare).ranked


def test_cores_have_one_memory() -> None:
    laptop = load_cluster("laptop")
    cores = replace(laptop, device=replace(laptop.device, synchronous=True))
    one = predicted("zero(2, offload=True)", SMALL, cores)
    assert one.memory.host == 0
    assert one.memory.total - one.memory.activations >= 16 * parameters(SMALL)
    assert offload_s(one) > 0
