"""Prices of ways to agree: worked examples, and what grows with what."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.segments import simulate_in_segments
from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.contention.messages import Routes
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import Network, RankGroup, collective_time, group_places, hops
from shoal.plan.sync_price import SyncQuestion
from shoal.plan.sync_price.price import SyncPrice, price_of
from shoal.plan.workloads import Precision
from shoal.plan.workloads.model_presets import transformer_named
from shoal.schedules.collectives import Collective
from shoal.schedules.steps.tensor_layout import TensorLayout
from shoal.strategy.strategy import parse

FP32 = Precision("fp32", 4, 4, 0, 8)
GPU = Device("gpu", 80e9, 2e12, {"fp32": 1e14})
NIC = LinkSpec("NIC", 25e9, 5e-6)  # 200 Gb/s
NVLINK = LinkSpec("NVLink", 250e9, 2e-6)


def cluster_of(nodes: int = 1, devices: int = 8, **options: Any) -> Cluster:
    node = Node(devices, fabric=NVLINK, nic=NIC)
    return Cluster("test", GPU, node, nodes, **options)


def ask(cluster: Cluster, replicas: int, parameters: float = 1e9, **options: Any) -> SyncQuestion:
    times = {"compute_s": 0.3, "backward_s": 0.2, "microbatches": 1, "workers": replicas}
    group = RankGroup(replicas, 1)
    return SyncQuestion(Network(cluster), group, parameters, FP32, **(times | options))


DEVICE = Device("device", 1e9, 1e9, {"fp32": 1e9})


def ports(ranks: int, bytes_per_s: float, alpha_s: float = 0.0) -> Routes:
    """Each rank is a node with one port."""
    node = Node(1, nic=LinkSpec("port", bytes_per_s, alpha_s))
    return Routes(Cluster("ports", DEVICE, node, ranks))


def by_rank(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds where a rank begins its next round as soon as it is through with this one."""
    return simulate_in_segments(collective, num_bytes, routes, 1)


ONE_EACH = Cluster("one device a node", GPU, Node(1, fabric=NVLINK, nic=NIC), 64)


def cost(text: str, question: SyncQuestion) -> SyncPrice:
    return price_of(parse(text).sync_for(question.replicas), question)


def part(found: SyncPrice, *names: str) -> float:
    return sum(one.seconds for one in found.parts if one.name in names)


def alone(replicas: int, parameters: float = 1e9, **options: Any) -> SyncQuestion:
    """On nodes of one device, where nothing hides communication."""
    return ask(ONE_EACH, replicas, parameters, backward_s=0.0, **options)


def test_three_replicas_send_1400_gb_up_and_as_much_down_through_a_server() -> None:
    found = cost('ps(placement="rank0")', alone(3, 175e9))
    for name in ("push", "pull"):
        assert part(found, name) == pytest.approx(1.4e12 / 25e9, rel=1e-3)


def test_server_time_grows_with_workers_where_the_rings_stays() -> None:
    served = [part(cost("ps", alone(n)), "push") for n in (8, 16, 32)]
    ringed = [part(cost("ddp", alone(n)), "gradients") for n in (8, 16, 32)]
    assert served[1] / served[0] == pytest.approx(2, rel=1e-3)
    assert served[2] / served[0] == pytest.approx(4, rel=1e-3)
    assert ringed[2] / ringed[0] < 1.3


def test_two_servers_into_one_uplink_take_twice_as_long() -> None:
    """1 TB over 200 Gb/s is 40 s; two nodes that share one such uplink need 80 s."""
    rack = replace(ONE_EACH, nodes_per_rack=2, oversubscription=2.0, nodes=4)
    flat = replace(ONE_EACH, nodes=4)
    wide, narrow = (
        part(cost('ps(placement="workers")', ask(where, 4, 250e9, backward_s=0.0)), "push")
        for where in (flat, rack)
    )
    assert wide == pytest.approx(0.75 * 40, rel=1e-3)
    assert narrow == pytest.approx(40, rel=1e-3)  # half of it crosses, at half the rate


def test_replicas_add_hops_of_a_chain_and_the_first_of_an_eventual_one_waits_for_none() -> None:
    chains = [part(cost(f"ps(replicas={r})", alone(4)), "chain") for r in (1, 2, 3)]
    assert chains[0] == 0
    assert chains[2] == pytest.approx(2 * chains[1])
    assert part(cost('ps(replicas=3, consistency="eventual")', alone(4)), "chain") == 0
    one, three = (cost(text, alone(4)).memory.servers for text in ("ps", "ps(replicas=3)"))
    assert three > one  # of each: pushes are kept until the whole chain has them


def test_more_servers_divide_the_incast_and_placement_on_workers_removes_it() -> None:
    one, four = (part(cost(f"ps(servers={n})", alone(16)), "push") for n in (1, 4))
    spread = part(cost('ps(placement="workers")', alone(16)), "push")
    assert one / four == pytest.approx(4, rel=1e-3)
    assert spread == pytest.approx(one / 16 * 15 / 16, rel=1e-2)


def test_async_is_the_sum_of_rates_until_the_servers_are_busy() -> None:
    assert part(cost('ps(mode="async")', alone(2, 1e6)), "servers") < 0.01 * 0.3
    found = cost('ps(mode="async")', alone(64))
    cycle_s = 0.3 + sum(one.seconds for one in found.parts)
    assert cycle_s >= 64 * 4e9 / 25e9  # all pushes pass the server's NIC, and all pulls beside


def test_stragglers_cost_the_synchronous_rule_most() -> None:
    noisy = replace(ONE_EACH, noise=Noise(0.1, 0.05, 4.0))
    question = ask(noisy, 16, 1e6)
    sync, quorum, stale, free = (
        part(cost(text, question), "stragglers")
        for text in ("ps", "ps(quorum=0.75)", "ps(staleness=3)", 'ps(mode="async")')
    )
    assert sync > stale > free > 0 and sync > quorum
    low, high = cost("ddp", question).spread_s
    assert low > 0 and high > 0


def test_compressed_pushes_are_smaller_and_pulls_are_not() -> None:
    plain, packed = (cost(text, alone(8)) for text in ("ps", 'ps(compress="int8")'))
    assert plain.sent_bytes / packed.sent_bytes == pytest.approx(4, rel=0.05)
    assert part(packed, "pull") == part(plain, "pull")


def test_backward_hides_all_but_the_last_bucket_of_ddp() -> None:
    exposed = [
        part(cost("ddp", ask(ONE_EACH, 8, 1e9, backward_s=s, compute_s=9)), "gradients")
        for s in (0.0, 0.1, 5.0)
    ]
    assert exposed[0] - exposed[1] == pytest.approx(0.1, rel=0.01)
    whole, last = exposed[0], exposed[2]
    assert 0 < last < 0.02 * whole


def test_cpus_without_idle_cores_hide_nothing() -> None:
    device = replace(GPU, synchronous=True, threads=1)
    memory = LinkSpec("shared memory", 5e9, 1e-6)

    def gradients(cores: int, **options: float) -> float:
        node = Node(4, fabric=memory, cores=cores, memory_bytes_per_s=2e10)
        return part(cost("ddp", ask(Cluster("host", device, node), 4, 1e8, **options)), "gradients")

    assert gradients(4) == gradients(4, backward_s=0.0) > gradients(8)


def test_zero_3_gathers_beside_computation() -> None:
    slow, fast = (
        ask(ONE_EACH, 8, 1e9, compute_s=s, backward_s=s * 2 / 3, layer_parameters=1e7)
        for s in (0.03, 30.0)
    )
    assert part(cost("zero(3)", slow), "weights") > 10 * part(cost("zero(3)", fast), "weights")
    assert part(cost("zero(3)", fast), "weights") > 0


def measured_host(ranks: int, meet_s: float) -> Cluster:
    """CPU workers whose calls take 1 ms, those of a reduction 3 ms."""
    kinds = {"all_reduce": 1e-3, "reduce": 3e-3, "broadcast": 1e-3, "reduce_scatter": 1e-3}
    calls = tuple(
        MeasuredCalls("shm", kind, "", ranks, ((1.0, seconds), (1e12, seconds)))
        for kind, seconds in kinds.items()
    )
    core = replace(GPU, synchronous=True, meet_s=meet_s)
    return Cluster("host", core, Node(ranks, fabric=NVLINK, measured=calls))


def test_zero_on_a_host_reduces_and_broadcasts_shard_by_shard() -> None:
    tensors = TensorLayout(((1000, 1000),) * 4)
    found = cost("zero(1)", ask(measured_host(8, 0.0), 8, 4e6, tensors=tensors))
    copies_s = 2 * 16e6 / GPU.memory_bytes_per_s
    assert part(found, "gradients") == pytest.approx(4 * 3e-3 + 1e-3 + copies_s)  # and the header
    assert part(found, "weights") == pytest.approx(4 * 1e-3)  # half of the ranks own nothing


@pytest.mark.parametrize(
    ("strategy", "tensor", "meetings"),
    [("zero(1)", 1000, 1), ("zero(2)", 1000, 3), ("zero(2)", 100, 1)],
)
def test_backward_under_zero_2_stops_where_two_large_buckets_wait(
    strategy: str, tensor: int, meetings: int
) -> None:
    """All ranks meet after backward; with four buckets of 4 MB also before the last two."""
    tensors = TensorLayout(((tensor, tensor),) * 4)
    idle, busy = (
        cost(strategy, ask(measured_host(8, meet_s), 8, 4 * tensor**2, tensors=tensors))
        for meet_s in (0.0, 1e-4)
    )
    met_s = part(busy, "gradients") - part(idle, "gradients")
    assert met_s == pytest.approx(meetings * 1e-4)


def test_a_server_of_many_workers_finds_their_pushes_in_no_cache() -> None:
    host = cpu_host(memory_efficiency=Curve(((1e6, 1.0), (1e7, 0.1))))
    few, many = (
        part(cost('ps(mode="async")', ask(host, n, 2.5e5, backward_s=0.0)), "push") for n in (2, 16)
    )
    assert many > 1.1 * few  # the same bytes of one worker


def cpu_host(**figures: Any) -> Cluster:
    core = replace(GPU, synchronous=True, threads=1, **figures)
    return Cluster("host", core, Node(16, fabric=NVLINK, cores=16, crowded=((16, core),)))


def test_measured_asynchronous_pushes_take_the_place_of_passes_over_memory() -> None:
    host = cpu_host(served_bytes_per_s=1e9, request_s=1e-3)
    question = ask(host, 16, 2.5e6, backward_s=0.0)  # 10 MB
    async_price = cost('ps(mode="async")', question)
    assert part(async_price, "push and pull") == pytest.approx(10e-3)
    assert part(async_price, "requests") == pytest.approx(1e-3)
    total = sum(part.seconds for part in async_price.parts) + question.compute_s
    assert total >= 16 * 11e-3  # the server is busy all the time
    two = cost('ps(mode="async", servers=2)', question)
    assert 5e-3 <= part(two, "push and pull") < 10e-3
    assert part(cost('ps(mode="async", replicas=3)', question), "push") > 0


def test_zero_2_reduces_every_microbatch() -> None:
    question = alone(8, microbatches=4)
    one, two = (part(cost(f"zero({stage})", question), "gradients") for stage in (1, 2))
    assert two == pytest.approx(4 * one)


def test_hierarchical_all_reduce_beats_a_flat_ring_on_nodes_of_eight() -> None:
    question = ask(cluster_of(16, nodes_per_rack=4, oversubscription=4.0), 128, backward_s=0.0)
    ring = part(cost('ddp(algorithm="ring")', question), "gradients")
    assert part(cost("ddp", question), "gradients") <= ring


def test_gossip_over_racks_pays_for_the_messages_that_leave_them() -> None:
    racks = replace(ONE_EACH, nodes_per_rack=8, oversubscription=8.0)
    near, far = (cost(text, ask(racks, 32)) for text in ("gossip", 'gossip(graph="complete")'))
    assert part(far, "neighbours") > 10 * part(near, "neighbours")
    assert "second eigenvalue" in near.convergence


def test_local_sgd_divides_its_all_reduce_over_its_steps() -> None:
    often, rarely = (cost(f"localsgd(every={n})", alone(8)) for n in (1, 16))
    assert part(often, "weights") == pytest.approx(16 * part(rarely, "weights"))
    assert often.sent_bytes == 16 * rarely.sent_bytes


def test_steps_hide_an_overlapped_average_up_to_their_own_time() -> None:
    compute_s = 0.02
    plain, hidden, part_of_it = (
        cost(f"localsgd(every=16{more})", alone(8, compute_s=compute_s))
        for more in ("", ", overlap=True", ", overlap=True, delay=1")
    )
    took_s = 16 * part(plain, "weights")
    assert took_s < 16 * compute_s
    assert part(hidden, "weights") == 0
    assert part(part_of_it, "weights") == pytest.approx((took_s - compute_s) / 16)
    assert hidden.sent_bytes == plain.sent_bytes


def test_shared_memory_of_several_hosts_is_refused() -> None:
    with pytest.raises(BadInput, match="memory of one host"):
        cost("hogwild", alone(8))


@pytest.mark.parametrize("graph", ["ring", "complete", "one-peer"])
def test_asynchronous_pairs_send_and_receive_twice_a_step_over_any_graph(graph: str) -> None:
    """As on a ring, where each has two neighbours."""
    found = cost(f'gossip(graph="{graph}", mode="async")', alone(8))
    ring = cost('gossip(graph="ring")', alone(8))
    assert found.sent_bytes == ring.sent_bytes
    assert part(found, "neighbours") == pytest.approx(part(ring, "neighbours"), rel=0.2)


def test_hogwild_is_bound_by_the_hosts_memory() -> None:
    narrow = Cluster("host", GPU, Node(8, fabric=NVLINK, memory_bytes_per_s=1e10))
    found = cost("hogwild", ask(narrow, 8, 1e9, compute_s=0.01))
    assert part(found, "shared weights") > 1


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
        assert part_of("gradients", f"zero({stage})").seconds <= 1.2 * summed_s
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
    call_s = CLUSTER.device.call_s
    assert both_ways.seconds - call_s == pytest.approx(2 * (reduced.seconds - call_s))


def test_every_layer_that_zero_3_gathers_has_its_own_latency() -> None:
    assert part_of("weights", "zero(3)").bound.startswith("latency of 127 messages")
    assert "GB/s" in part_of("weights", "zero(2)").bound  # all of them in one
