"""Messages and collectives in virtual time."""

from __future__ import annotations

import pytest
import torch

from shoal.cluster.presets import load_cluster
from shoal.cluster.topology import ClusterTopology
from shoal.comm.group import Group
from shoal.plan.contention.collectives import hierarchical
from shoal.plan.contention.messages import Routes, simulate_collective
from shoal.rehearse.network import phases_of, phases_of_schedule
from shoal.runtime import clock
from shoal.schedules.collectives.catalog import build
from tests.rehearse.worlds import CLUSTER, run_virtual


def time_of(group: Group, numel: int) -> float:
    group.all_reduce(torch.zeros(numel)).wait()
    return clock.monotonic()


def test_a_message_takes_its_alpha_and_its_bytes() -> None:
    topology = ClusterTopology(load_cluster(CLUSTER).of_size(16))

    def body(group: Group) -> float:
        if group.rank == 0:
            group.send(torch.zeros(1000), 9).wait()
        elif group.rank == 9:
            group.recv(torch.zeros(1000), 0).wait()
        return clock.monotonic()

    expected_s = topology.alpha_s(0, 9) + 4000 / topology.bytes_per_s(0, 9)
    assert run_virtual(16, body)[9] == pytest.approx(expected_s)


def test_two_messages_share_a_link() -> None:
    topology = ClusterTopology(load_cluster(CLUSTER).of_size(2))
    numel = 10_000_000

    def body(group: Group) -> float:
        if group.rank == 0:
            for tag in (1, 2):
                group.send(torch.zeros(numel), 1, tag)
        else:
            works = [group.recv(torch.zeros(numel), 0, tag) for tag in (1, 2)]
            for work in works:
                work.wait()
        return clock.monotonic()

    alone_s = 4 * numel / topology.bytes_per_s(0, 1)
    both_s = 2 * (topology.alpha_s(0, 1) + alone_s)  # alphas at the port follow each other
    assert run_virtual(2, body)[1] == pytest.approx(both_s)


def test_messages_of_a_tag_arrive_in_their_order() -> None:
    def body(group: Group) -> list[float]:
        if group.rank == 0:
            for number in range(5):
                group.send(torch.full((10 ** (5 - number),), float(number)), 1)
            return []
        found = [torch.empty(10 ** (5 - number)) for number in range(5)]
        for into in found:
            group.recv(into, 0).wait()
        return [float(into[0]) for into in found]

    assert run_virtual(2, body)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("size", [4, 8])
def test_an_all_reduce_in_a_node_takes_as_long_as_its_ring_simulated(size: int) -> None:
    numel = 1 << 20
    cluster = load_cluster(CLUSTER).of_size(size)
    ring = build("all_reduce", "ring", size)
    routes = Routes(cluster)
    simulated_s = simulate_collective(ring, 4 * numel, routes)
    found = run_virtual(size, lambda group: time_of(group, numel))
    assert found == [pytest.approx(simulated_s, rel=0.02)] * size


def test_an_all_reduce_of_nodes_takes_as_long_as_the_hierarchical_one_simulated() -> None:
    numel = 1 << 22
    cluster = load_cluster(CLUSTER).of_size(32)
    routes = Routes(cluster)
    simulated_s = simulate_collective(hierarchical(cluster, 32), 4 * numel, routes)
    found = run_virtual(32, lambda group: time_of(group, numel))
    assert found == [pytest.approx(simulated_s, rel=0.05)] * 32


def test_a_collective_begins_when_the_last_rank_has_come() -> None:
    def body(group: Group) -> float:
        clock.sleep(float(group.rank))
        group.barrier().wait()
        return clock.monotonic()

    ends = run_virtual(4, body)
    assert ends == [pytest.approx(3.0, abs=1e-3)] * 4
    assert min(ends) > 3.0


def test_ranks_that_call_other_collectives_are_told() -> None:
    def body(group: Group) -> str:
        work = group.barrier() if group.rank else group.all_reduce(torch.zeros(2))
        with pytest.raises(Exception, match="rank 0 calls all_reduce where rank 1 calls barrier"):
            work.wait()
        return "told"

    assert run_virtual(2, body) == ["told"] * 2


@pytest.mark.parametrize("algorithm", ["tree", "halving", "naive"])
def test_phases_of_a_named_algorithm_move_all_of_its_bytes(algorithm: str) -> None:
    collective = build("all_reduce", algorithm, 8)
    phases = phases_of_schedule(collective, range(8), 800)
    moved = sum(message.num_bytes for phase in phases for message in phase)
    wire = (collective.table.src != collective.table.dst).sum()
    assert moved == pytest.approx(float(wire) * float(collective.chunk_bytes(800)))


def test_long_vectors_are_summed_in_each_rack_first() -> None:
    """Hosts 0 1 | 2 3: half of the bytes leave a host for the other rack, in two rounds."""
    inside, between, back = phases_of("all_reduce", (0, 1, 2, 3), 1 << 20, (1, 2))
    assert (
        [message[:2] for message in inside]
        == [(0, 1), (1, 0), (2, 3), (3, 2)]
        == [message[:2] for message in back]
    )
    assert [message[:2] for message in between] == [(0, 2), (2, 0), (1, 3), (3, 1)]
    assert {message.num_bytes for message in between} == {1 << 19}


def test_short_vectors_take_few_rounds_between_hosts() -> None:
    assert len(phases_of("all_reduce", tuple(range(64)), 4096, (1, 4))) <= 12


def test_phases_of_one_rank_are_none() -> None:
    assert phases_of("all_reduce", (3,), 100, (8,)) == []
