"""Collectives in segments: what overlaps, and what does not."""

from __future__ import annotations

import pytest

from benchmarks.host_schedules import PLAIN, WITH_RACKS, crossed, host_schedule
from benchmarks.segments import simulate_in_segments
from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.schedules.collectives.catalog import build
from tests.plan.sync_questions import by_rank, ports

BYTES = 48e6
RATE = 100e6
PORT = ports(4, RATE)


@pytest.mark.parametrize("name", ["ring", "star", "tree", "hierarchical"])
def test_one_segment_is_the_simulation_without_segments(name: str) -> None:
    collective = build("all_reduce", name, 4)
    whole_s = by_rank(collective, BYTES, PORT)
    assert simulate_in_segments(collective, BYTES, PORT, 1) == pytest.approx(whole_s)


def test_a_star_sends_back_a_segment_while_the_next_ones_come() -> None:
    star = build("all_reduce", "star", 4)
    one_way_s = 3 * BYTES / RATE
    took_s = simulate_in_segments(star, BYTES, PORT, 12)
    assert took_s == pytest.approx(one_way_s * (1 + 1 / 12))


def test_a_ring_gains_nothing_from_segments() -> None:
    ring = build("all_reduce", "ring", 4)
    bound_s = 2 * 3 / 4 * BYTES / RATE
    assert simulate_in_segments(ring, BYTES, PORT, 7) == pytest.approx(bound_s)


def test_bad_order_and_levels_are_priced_on_the_links_of_racks() -> None:
    """Two racks of two hosts at 1:4: the uplink of a rack has half the rate of a host."""
    nic = LinkSpec("nic", 100e6, 0.0)
    device = Device("cpu", 1e9, 1e9, {"fp32": 1e9})
    cluster = Cluster("racks", device, Node(1, nic=nic), 4, 2, oversubscription=4.0)
    took_s = {
        name: host_schedule(name, 4, 2).predicted_s(cluster, int(BYTES))
        for name in (*PLAIN, *WITH_RACKS)
    }
    assert crossed(4, 2) == [0, 2, 1, 3]
    assert took_s["ring"] == pytest.approx(2 * 3 / 4 * BYTES / 50e6)
    assert took_s["gloo"] == took_s["ring"]
    assert took_s["crossed ring"] == pytest.approx(2 * took_s["ring"])
    assert BYTES / 50e6 < took_s["hierarchical"] < took_s["ring"] < took_s["star"]
