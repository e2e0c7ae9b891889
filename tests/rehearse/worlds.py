"""Virtual ranks for tests, as `tests.conftest.run_world` has threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.comm.group import Group
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse.executor import Virtual, VirtualRanks
from shoal.rehearse.network import VirtualNetwork
from shoal.rehearse.pace import WorkerTimes
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.threading_like import VirtualClock
from shoal.rehearse.virtual_time import VirtualTime
from shoal.rehearse.world import RehearsalSpec, Rehearsed, Train, rehearse
from shoal.runtime import clock
from shoal.strategy.strategy import as_strategy

CLUSTER = "dgx-a100"
TIMES = WorkerTimes(
    rows=16,
    forward_s=(0.004,) * 4,
    backward_s=(0.008,) * 4,
    weight_s=(0.004,) * 4,
    update_s=0.001,
    apply_s=0.0005,
)


def in_virtual_time(body: Callable[[VirtualTime], Any]) -> Any:
    """What `body(time)` returns as the first fiber."""
    time = VirtualTime()
    with clock.replaced(VirtualClock(time)):
        return time.run(lambda: body(time))


def run_virtual(
    size: int, body: Callable[[Group], Any], cluster: Cluster | None = None
) -> list[Any]:
    """What `body(group)` returns on each rank."""
    found: dict[int, Any] = {}

    def main(time: VirtualTime) -> None:
        network = VirtualNetwork((cluster or load_cluster(CLUSTER)).of_size(size), time)
        ranks = VirtualRanks(network, time, range(size), "auto")

        def run(rank: int) -> None:
            found[rank] = body(Group(Virtual(ranks, range(size), rank)))

        fibers = [
            time.spawn(f"rank {rank}", partial(run, rank), RandomState()) for rank in range(size)
        ]
        for fiber in fibers:
            time.join(fiber)

    in_virtual_time(main)
    return [found[rank] for rank in range(size)]


def rehearsed(train: Train, strategy: str, workers: int, **options: Any) -> Rehearsed:
    options = {"times": TIMES, "uneven": Unevenness(), **options}
    cluster = options.pop("cluster", None) or load_cluster(CLUSTER)
    return rehearse(train, RehearsalSpec(as_strategy(strategy), workers, cluster, **options))
