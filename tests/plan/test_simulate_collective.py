from __future__ import annotations

import pytest

from shoal.plan.price import price
from shoal.plan.simulator.collectives import simulate_collective
from shoal.schedules.collectives.catalog import CATALOG, build
from tests.plan.wires import by_rank, ports
from tests.products import few_or_all

ALPHA_S = 1e-5
RATE = 1e10
ALGORITHMS = [(kind, name) for kind, family in CATALOG.items() for name in family]
UNEVEN = ("sequential", "naive", "double_tree", "hierarchical")  # a rank may be ahead of others


def check_equal(kind: str, name: str, ranks: int, num_bytes: int) -> None:
    collective = build(kind, name, ranks)
    wires = ports(ranks, RATE, ALPHA_S)
    closed_s = price(collective, num_bytes, ALPHA_S, 1 / RATE).time_s
    assert simulate_collective(collective, num_bytes, wires) == pytest.approx(closed_s, rel=1e-6)
    if len(collective.table.src) <= 20_000:
        own_pace_s = by_rank(collective, num_bytes, wires)
        assert own_pace_s <= closed_s * (1 + 1e-6)
        if name not in UNEVEN:
            assert own_pace_s == pytest.approx(closed_s, rel=1e-3)


@pytest.mark.parametrize("num_bytes", few_or_all([100_000_000], [1000, 100_000_000]))
@pytest.mark.parametrize(
    "ranks", few_or_all([2, 5, 8], [*range(2, 9), 12, 16, 24, 31, 32, 33, 48, 63, 64])
)
def test_simulation_equals_the_closed_form_without_contention(ranks: int, num_bytes: int) -> None:
    for kind, name in ALGORITHMS:
        check_equal(kind, name, ranks, num_bytes)


def test_the_worked_example_of_an_uplink() -> None:
    """Two servers at 10 Gb/s behind one 10 Gb/s uplink take twice as long as one alone."""
    star = build("broadcast", "star", 2)
    assert simulate_collective(star, 1e9, ports(2, 1.25e9)) == pytest.approx(0.8)
    racks = ports(4, 1.25e9, per_rack=2, oversubscription=2)
    # rounds of shift 1, 2, 3: one of two flows leaves a rack, then both, then one
    both = build("all_to_all", "shift", 4)
    assert simulate_collective(both, 4e9, racks) == pytest.approx(0.8 + 1.6 + 0.8)
