from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.simulator.messages import FlowNetwork, Longs, max_min_rates


def paths_of(*links: list[int]) -> Longs:
    width = max(1, *map(len, links))
    return np.array([[*path, *[-1] * (width - len(path))] for path in links], np.int64)


def test_two_flows_into_one_link_get_half_each() -> None:
    """Two servers at 10 Gb/s into one uplink of 10 Gb/s take twice as long."""
    rates = max_min_rates(paths_of([0, 2], [1, 2]), np.array([1.25e9, 1.25e9, 1.25e9]))
    assert rates.tolist() == [0.625e9, 0.625e9]


def test_a_flow_takes_what_a_slower_one_leaves() -> None:
    """The example of Bertsekas and Gallager: a long flow over links that others share."""
    paths = paths_of([0, 1, 2], [0], [1], [1], [2])
    assert max_min_rates(paths, np.ones(3)) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_a_flow_without_links_is_not_limited() -> None:
    assert max_min_rates(paths_of([], [0]), np.array([2.0])).tolist() == [math.inf, 2.0]
    assert max_min_rates(np.empty((0, 1), np.int64), np.ones(1)).size == 0


@st.composite
def networks(draw: st.DrawFn) -> tuple[Longs, list[float]]:
    capacities = draw(st.lists(st.floats(0.5, 20), min_size=1, max_size=6))
    links = st.sets(st.integers(0, len(capacities) - 1), min_size=1, max_size=4)
    flows = draw(st.lists(links, min_size=1, max_size=12))
    return paths_of(*map(sorted, flows)), capacities


@settings(deadline=None, max_examples=60)
@given(networks())
def test_every_flow_has_a_full_link_on_which_it_is_among_the_fastest(
    network: tuple[Longs, list[float]],
) -> None:
    """What defines max-min fairness: no flow can rise without lowering one that is not faster."""
    paths, capacities = network
    rates = max_min_rates(paths, np.array(capacities))
    on = {link: rates[(paths == link).any(axis=1)] for link in range(len(capacities))}
    for link, capacity in enumerate(capacities):
        assert on[link].sum() <= capacity * (1 + 1e-6)
    for path, rate in zip(paths.tolist(), rates, strict=True):
        assert any(
            on[link].sum() >= capacities[link] * (1 - 1e-6) and rate >= on[link].max() * (1 - 1e-6)
            for link in path
            if link >= 0
        )


@settings(deadline=None, max_examples=30)
@given(networks(), st.lists(st.floats(0.1, 5), min_size=12, max_size=12))
def test_flows_that_come_and_go_have_the_rates_of_those_that_are_there(
    network: tuple[Longs, list[float]], sizes: list[float]
) -> None:
    """New rates for what is connected with a change are the rates of a whole computation."""
    paths, capacities = network
    flows = FlowNetwork(np.array(capacities))
    there: dict[int, float] = {}
    for tag in range(len(paths)):
        flows.start(paths[[tag]], np.array([sizes[tag]]), np.array([tag]))
        there[tag] = sizes[tag]
        if tag % 2 and there:
            _check_next_end(flows, there, paths, np.array(capacities))
    while there:
        _check_next_end(flows, there, paths, np.array(capacities))
    assert len(flows) == 0 and flows.next_end_s() == math.inf


def _check_next_end(
    flows: FlowNetwork, there: dict[int, float], paths: Longs, capacities: np.ndarray
) -> None:
    rates = max_min_rates(paths[list(there)], capacities)
    took = min(left / rate for left, rate in zip(there.values(), rates, strict=True))
    began = flows.now_s
    assert flows.next_end_s() - began == pytest.approx(took, rel=1e-6, abs=1e-9)
    ended = flows.advance(flows.next_end_s()).tolist()
    for tag, rate in zip(list(there), rates, strict=True):
        there[tag] -= rate * took
    assert ended
    for tag in ended:
        assert there.pop(tag) == pytest.approx(0, abs=1e-6)


def test_links_count_what_they_carry() -> None:
    flows = FlowNetwork(np.array([1.0, 2.0, 4.0]))
    flows.start(paths_of([0, 1], [1]), np.array([3.0, 5.0]), np.array([7, 8]))
    assert flows.carried_bytes.tolist() == [3.0, 8.0, 0.0]
    assert flows.advance(flows.next_end_s()).tolist() == [7]  # both have rate 1
    assert flows.now_s == pytest.approx(3.0)
    assert flows.advance(flows.next_end_s()).tolist() == [8]  # 2 left, and the link alone
    assert flows.now_s == pytest.approx(4.0)
