from __future__ import annotations

import pytest

from shoal.plan.price import price
from shoal.plan.simulator.collectives import simulate_collective
from shoal.plan.simulator.messages import Routes
from shoal.schedules.collectives.catalog import CATALOG, build
from tests.plan.wires import OnePort, RackWires
from tests.products import few_or_all

ALPHA_S = 1e-5
RATE = 1e10
GAMMA = 5e-11
ALGORITHMS = [(kind, name) for kind, family in CATALOG.items() for name in family]
UNEVEN = ("sequential", "naive", "double_tree", "hierarchical")  # a rank may be ahead of others


def check_equal(kind: str, name: str, ranks: int, num_bytes: int) -> None:
    collective = build(kind, name, ranks)
    wires = OnePort(ranks, RATE, ALPHA_S)
    closed_s = price(collective, num_bytes, ALPHA_S, 1 / RATE, GAMMA).time_s
    in_rounds = simulate_collective(collective, num_bytes, wires, GAMMA, lockstep=True).seconds
    assert in_rounds == pytest.approx(closed_s, rel=1e-6)
    if len(collective.table.src) <= 20_000:
        by_rank = simulate_collective(collective, num_bytes, wires, GAMMA).seconds
        assert by_rank <= closed_s * (1 + 1e-6)
        if name not in UNEVEN:
            assert by_rank == pytest.approx(closed_s, rel=1e-3)


@pytest.mark.parametrize("num_bytes", few_or_all([100_000_000], [1000, 100_000_000]))
@pytest.mark.parametrize(
    "ranks", few_or_all([2, 5, 8], [*range(2, 9), 12, 16, 24, 31, 32, 33, 48, 63, 64])
)
def test_simulation_equals_the_closed_form_without_contention(ranks: int, num_bytes: int) -> None:
    for kind, name in ALGORITHMS:
        check_equal(kind, name, ranks, num_bytes)


def test_the_worked_example_of_an_uplink() -> None:
    """Two servers at 10 Gb/s behind one 10 Gb/s uplink take twice as long as one alone."""
    wires = RackWires(4, 2, 1.25e9, oversubscription=2)
    both = build("all_to_all", "shift", 4)
    alone = simulate_collective(build("broadcast", "star", 2), 1e9, OnePort(2, 1.25e9)).seconds
    assert alone == pytest.approx(0.8)
    run = simulate_collective(both, 4e9, wires, lockstep=True)
    # rounds of shift 1, 2, 3: one of two flows leaves a rack, then both, then one
    assert run.seconds == pytest.approx(0.8 + 1.6 + 0.8)


def test_a_rank_that_comes_late_delays_those_that_need_it() -> None:
    collective = build("broadcast", "tree", 4)
    wires = OnePort(4, RATE)
    run = simulate_collective(collective, 1e10, wires, start_s=[0, 0, 0, 5.0])
    assert run.seconds == pytest.approx(6.0)
    assert sorted(run.rank_end_s)[:2] == pytest.approx([2.0, 2.0])  # two do not meet rank 3


def test_the_messages_of_a_run_have_their_times_and_links_their_bytes() -> None:
    wires = OnePort(3, 1.0)
    run = simulate_collective(build("broadcast", "star", 3), 4, wires)
    assert [(m.src, m.dst, m.start_s, m.end_s) for m in run.messages] == [
        (0, 1, 0.0, pytest.approx(8.0)),
        (0, 2, 0.0, pytest.approx(8.0)),
    ]
    assert run.link_bytes.tolist() == [8, 0, 0, 0, 4, 4]
    assert run.busiest(Routes(wires)) == 0
