from __future__ import annotations

import pytest

from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.simulator.strategies import simulate_strategy
from shoal.plan.workloads.model_presets import named_workload

MODEL = named_workload(None, "layers=8,hidden=1024,heads=16,sequence=512")
CLUSTER = load_cluster("dgx-a100")


def seconds(strategy: str, workers: int = 8, batch: int = 64) -> tuple[float, float]:
    """Simulated and in closed form."""
    assert MODEL is not None
    settings = PlanSettings(batch)
    closed_s = predict(MODEL, CLUSTER, strategy, workers, settings).step_s
    return simulate_strategy(MODEL, CLUSTER, strategy, workers, settings).step_s, closed_s


def test_what_has_no_contention_takes_what_is_predicted() -> None:
    simulated_s, closed_s = seconds("single", workers=1)
    assert simulated_s == pytest.approx(closed_s, rel=1e-3)
    simulated_s, closed_s = seconds("ddp")
    assert simulated_s == pytest.approx(closed_s, rel=0.1)
    simulated_s, closed_s = seconds("ddp + tp(2) + pp(2)")
    assert simulated_s == pytest.approx(closed_s, rel=0.15)


@pytest.mark.parametrize("strategy", ["zero(3)", "gossip", "ps(staleness=1)", "localsgd(every=2)"])
def test_ways_that_differ_are_simulated_and_never_faster_than_one_worker(strategy: str) -> None:
    simulated_s, _ = seconds(strategy, workers=4, batch=32)
    alone_s, _ = seconds("single", workers=1, batch=8)
    assert simulated_s >= alone_s * (0.9 if strategy == "zero(3)" else 0.999)  # it shares updates


def test_many_micro_batches_are_added_and_not_simulated() -> None:
    assert MODEL is not None
    settings = PlanSettings(64, microbatch=1)
    found = simulate_strategy(MODEL, CLUSTER, "pp(2)", 2, settings)
    assert found.left_out == 64 - 6
    closed_s = predict(MODEL, CLUSTER, "pp(2)", 2, settings).step_s
    assert found.step_s == pytest.approx(closed_s, rel=0.1)


def test_hogwild_takes_batches_in_turns_in_both() -> None:
    assert MODEL is not None
    cores = load_cluster("laptop")
    settings = PlanSettings(8)
    closed_s = predict(MODEL, cores, "hogwild", 4, settings).step_s
    found = simulate_strategy(MODEL, cores, "hogwild", 4, settings)
    assert found.step_s == pytest.approx(closed_s, rel=0.02)


@pytest.mark.parametrize("options", ["servers=4", 'placement="workers"'])
def test_asynchronous_servers_on_a_network_take_what_is_predicted(options: str) -> None:
    """As many servers as workers: a worker's own NIC is the narrowest."""
    assert MODEL is not None
    network = load_cluster("ethernet-25")
    strategy = f'ps({options}, mode="async")'
    settings = PlanSettings(32)
    closed_s = predict(MODEL, network, strategy, 4, settings).step_s
    found = simulate_strategy(MODEL, network, strategy, 4, settings, steps=4)
    assert found.step_s == pytest.approx(closed_s, rel=0.05)
