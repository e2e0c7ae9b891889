"""What is alike is simulated once, and comes to the same as message by message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings
from shoal.plan.simulator.messages import Routes
from shoal.plan.simulator.step_tasks import StepWork, Unevenness, rank_grid
from shoal.plan.simulator.strategies import StepRun, simulate_step, simulate_strategy
from shoal.plan.sync_price import Agreeing
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import Layout
from tests.plan.test_sync_price import DEVICE

PCIE = LinkSpec("pcie", 16e9, 1e-6)
SHARED = replace(PCIE, shared=True)
FABRICS = (None, LinkSpec("fabric", 100e9, 2e-6), LinkSpec("bus", 50e9, 0.0, shared=True))
NIC = LinkSpec("nic", 3e9, 10e-6)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    devices = draw(st.sampled_from([1, 2, 4]))
    node = Node(
        devices,
        fabric=draw(st.sampled_from(FABRICS)),
        fabric_is_switched=draw(st.booleans()),
        pcie=draw(st.sampled_from([PCIE, SHARED])),
        devices_per_pcie=draw(st.sampled_from([1, 2])) if devices > 1 else 1,
        nic=draw(st.sampled_from([NIC, replace(NIC, transport="tcp")])),
        nics=draw(st.sampled_from([1, 2])),
    )
    nodes = draw(st.integers(2, 32 // devices))
    in_rack = draw(st.one_of(st.none(), st.integers(1, nodes)))
    return Cluster("drawn", DEVICE, node, nodes, in_rack, draw(st.sampled_from([1.0, 4.0])), 1e-6)


ALGORITHMS = ("auto", "ring", "hierarchical", "tree", "doubling", "halving")
WAYS = st.one_of(
    st.builds(
        Agreeing,
        st.just("all_reduce"),
        st.integers(1, 3),
        st.booleans(),
        algorithm=st.sampled_from(ALGORITHMS),
    ),
    st.builds(Agreeing, st.just("zero"), st.integers(1, 2), stage=st.sampled_from([2, 3])),
    st.builds(Agreeing, st.just("average"), every=st.integers(1, 2)),
    st.builds(
        Agreeing,
        st.just("gossip"),
        graph=st.sampled_from(["ring", "exponential", "one-peer", "complete", "random-regular"]),
    ),
    st.builds(
        Agreeing,
        st.just("servers"),
        st.integers(1, 2),
        apply_s=st.sampled_from([0.0, 0.1]),
        quorum=st.one_of(st.none(), st.integers(1, 40)),
    ),
)


def all_ends(run: StepRun) -> list[list[float]]:
    """When workers have done each step, in order of these times."""
    numbers = list(run.like.values())
    return [sorted(np.repeat(ends, numbers).tolist()) for ends in run.rank_end_s]


@settings(deadline=None, max_examples=150)
@given(clusters(), WAYS, st.data())
def test_one_of_many_that_are_alike_takes_what_all_take_message_by_message(
    cluster: Cluster, agreeing: Agreeing, data: st.DataObject
) -> None:
    most = cluster.devices
    sizes = [(tp, pp) for tp, pp in ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)) if tp * pp <= most]
    tp, pp = data.draw(st.sampled_from(sizes))
    ranks = rank_grid(Layout(data.draw(st.integers(1, most // (tp * pp))), tp, pp))
    if len(ranks) > 2:
        lost = data.draw(st.sets(st.integers(0, len(ranks) - 1), max_size=1))
        ranks = np.delete(ranks, list(lost), axis=0)
    if agreeing.way == "gossip" and (len(ranks) < 4 or len(ranks) % 2):
        agreeing = replace(agreeing, graph="ring")
    devices = st.integers(0, most - 1)
    if agreeing.way == "servers":
        there = tuple(data.draw(st.lists(devices, min_size=1, max_size=5)))
        agreeing = replace(agreeing, servers=there)
    inside = 1 if agreeing.algorithm == "ring" else cluster.node.devices
    agreeing = replace(agreeing, node_devices=inside)
    slow = data.draw(st.dictionaries(devices, st.sampled_from([1.5, 3.0]), max_size=2))
    work = StepWork(
        (1.0,) * pp,
        tuple(1.0 + stage for stage in range(pp)),
        microbatches=pp,
        boundary_bytes=1e8,
        gradient_bytes=(4e9,) * pp,
        parameter_bytes=(2e9,) * pp,
        update_s=0.1,
    )
    steps = data.draw(st.integers(1, 2))
    question = (work, agreeing, ranks, Routes(cluster), Unevenness(slow=slow))
    apart = simulate_step(*question, steps=steps, by_symmetry=False)
    together = simulate_step(*question, steps=steps, by_symmetry=True)
    assert sum(together.like.values()) == len(apart.like) == ranks.size
    assert together.step_s == pytest.approx(apart.step_s, rel=1e-9)
    for found, expected in zip(all_ends(together), all_ends(apart), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    assert together.link_bytes == pytest.approx(apart.link_bytes, rel=1e-9)
    assert together.flows <= apart.flows


MANY = 100_000
RACKS = replace(load_cluster("dgx-h100"), nodes=12_512, nodes_per_rack=32, oversubscription=4.0)
MODEL = transformer_named("layers=24,hidden=2048,heads=16")
SLOW_RACK = Unevenness(slow=dict.fromkeys(range(768, 1024), 2.0))
LOST_NODE = range(96, 104)


def simulated(strategy: str, uneven: Unevenness, lost: range = range(0)) -> StepRun:
    question = (MODEL, RACKS, strategy, MANY, PlanSettings(4 * MANY), uneven)
    return simulate_strategy(*question, lost=lost).run


@pytest.mark.parametrize(
    ("strategy", "ranks", "flows"),
    [
        ("ddp(algorithm='ring')", 1, 5),
        ("ddp(algorithm='hierarchical')", 1, 5),
        ("zero(1)", 1, 5),
        ("zero(3)", 1, 5),
        ("ps(servers=128)", 30, 1000),
        ("ps(servers=128, quorum=0.9)", 30, 1000),
        ("ps(servers=128, mode='async')", 30, 1000),
        ("localsgd(every=16)", 1, 1000),
    ],
)
def test_a_hundred_thousand_workers_are_a_few_classes(
    strategy: str, ranks: int, flows: int
) -> None:
    run = simulated(strategy, Unevenness())
    assert sum(run.like.values()) == MANY
    assert len(run.like) <= ranks and run.flows <= flows and run.events < 2000


def test_a_slow_rack_and_a_lost_node_split_what_they_meet() -> None:
    run = simulated("ddp(algorithm='hierarchical')", SLOW_RACK, LOST_NODE)
    assert run.like == {0: MANY - 256 - 8, 768: 256} and run.flows <= 10
    for rank, kinds in run.spans_by_rank.items():
        forward = next(span for span in kinds if span.kind == "forward")
        slower = 2.0 if rank == 768 else 1.0
        alone = next(span for span in run.spans_by_rank[0] if span.kind == "forward")
        assert forward.end_ns == pytest.approx(slower * alone.end_ns, rel=1e-6)


def test_workers_that_are_not_alike_may_be_fewer() -> None:
    noise = Unevenness(replace(RACKS.noise, jitter=0.1), 1)
    with pytest.raises(BadInput, match="100000 workers that are not alike are too many"):
        simulated("ddp", noise)
    with pytest.raises(BadInput, match="halving over 100000 ranks has too many messages"):
        simulated("ddp(algorithm='halving')", Unevenness())
