"""Groups of ranks on nodes and racks, against a look at every rank of the topology."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from shoal.cluster import Cluster, Node
from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import RankGroup, collective_time, group_places, hops
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse
from tests.plan.sync_questions import GPU, NIC, NVLINK, cluster_of

SIZES = (2, 3, 4, 6, 8, 12)
STRIDES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_places_are_those_of_a_look_at_every_rank(devices: int) -> None:
    for size, stride in itertools.product(SIZES, STRIDES):
        group = RankGroup(size, stride)
        total = 2 * devices * size * stride
        cluster = Cluster("looked at", GPU, Node(devices), total // devices)
        leaving, pairs, counts, most = Counter[int](), Counter[int](), set(), 0
        for block, first in itertools.product(range(0, total, size * stride), range(stride)):
            nodes = [cluster.place(block + first + i * stride)[1] for i in range(size)]
            counts |= {nodes.count(node) for node in nodes}
            most = max(most, max(map(nodes.count, nodes)) if len(set(nodes)) > 1 else 0)
            for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True):
                leaving[here] += here != there
                pairs[here] += size - nodes.count(here)
        found = group_places(group, devices, total)
        assert found.leaving == max(leaving.values()), (group, devices)
        assert found.leaving_pairs == max(pairs.values()), (group, devices)
        assert found.inside == (most or size), (group, devices)
        assert found.is_even == (len(counts) == 1), (group, devices)


def test_a_group_that_crosses_a_node_is_as_slow_as_the_network() -> None:
    """Three of eight ranks: groups (6, 7, 8) and (15, 16, 17) both leave the second node."""
    three = hops(cluster_of(3), RankGroup(3, 1))
    assert [hop.level for hop in three] == ["NVLink", "NIC"]
    assert three[-1].bytes_per_s == NIC.rate / 2
    (two,) = hops(cluster_of(3), RankGroup(2, 1))
    assert two.bytes_per_s == NVLINK.rate


def test_all_ranks_of_a_rack_share_its_uplinks_in_an_all_to_all() -> None:
    racks = cluster_of(8, nodes_per_rack=4, oversubscription=4)
    took = collective_time(racks, "all_to_all", RankGroup(64, 1), 64e6)
    uplinks = 4 * NIC.rate / 4
    assert took.bound.startswith("spine uplink 1:4")
    assert took.seconds == pytest.approx(63 * NIC.alpha_s + 32 * 32 * 1e6 / uplinks)


WORKERS = 1024
CLUSTER = load_cluster("dgx-h100").of_size(WORKERS)


def part_of(name: str, strategy: str, workers: int = WORKERS) -> Part:
    predictor = Predictor(transformer_named("llama-2-7b"), CLUSTER.of_size(workers))
    prediction = predictor.predict(parse(strategy), workers, PlanSettings(workers, microbatch=1))
    return next(part for part in prediction.parts if part.name == name)


def test_a_reduction_to_owners_costs_no_more_than_the_sum_that_contains_it() -> None:
    summed_s = part_of("gradients", "ddp").seconds
    for stage in (1, 2):
        assert part_of("gradients", f"zero({stage})").seconds <= 1.1 * summed_s
    few, many = (part_of("gradients", "zero(3)", workers).seconds for workers in (128, WORKERS))
    assert many < 8 * few + 0.05  # they do not grow with the square of replicas


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "all_gather"])
def test_small_messages_are_bound_by_their_latency_and_large_ones_by_a_link(kind: str) -> None:
    group = RankGroup(WORKERS, 1)
    small = collective_time(CLUSTER, kind, group, 1024)
    large = collective_time(CLUSTER, kind, group, 1e11)
    assert small.bound == f"latency of {small.messages} messages a call"
    assert "GB/s" in large.bound
    assert large.messages == 0


def test_a_reduction_goes_up_trees_over_nodes() -> None:
    group = RankGroup(WORKERS, 1)
    reduced = collective_time(CLUSTER, "reduce", group, 1024)
    assert reduced.messages == 7 + 7  # ranks of a node, and log2 of 128 nodes
    both_ways = collective_time(CLUSTER, "all_reduce", group, 1024)
    assert both_ways.seconds == pytest.approx(2 * reduced.seconds)


def test_every_layer_that_zero_3_gathers_has_its_own_latency() -> None:
    assert part_of("weights", "zero(3)").bound.startswith("latency of 127 messages")
    assert "GB/s" in part_of("weights", "zero(2)").bound  # all of them in one
