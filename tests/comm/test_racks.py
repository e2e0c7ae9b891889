"""The order of hosts by racks, and sums inside racks first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.cluster.toml_file import cluster_text
from shoal.comm.call import Call
from shoal.comm.executors.hierarchical.tcp_links import TcpInterHost
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.schedule_selection import AlgorithmSelector, Ordered, for_subset
from shoal.comm.network import HostNetwork, in_ring_order
from shoal.commands.run import with_cluster
from shoal.errors import BadInput
from shoal.lab.design import LabDesign
from shoal.runtime.config import RunConfig
from shoal.schedules.collectives.cost import Link
from shoal.schedules.collectives.proof import prove
from shoal.transport.tcp.transport import TcpTransport, is_built
from tests.comm.threads import Ranks, Table
from tests.transport.tcp import on_tcp


def in_order(configs: list[RunConfig]) -> Topology:
    """Of one rank on each of so many hosts."""
    table = Table(len(configs))
    ranks = Ranks[Topology]()
    hosts = tuple((rank,) for rank in range(len(configs)))

    def main(rank: int) -> None:
        try:
            network = HostNetwork(configs[rank])
            topology = Topology(hosts, rank)
            ranks.results[rank] = in_ring_order(topology, network, table.exchange(rank))
        except BaseException as error:
            ranks.failures.append(error)

    return ranks.run(len(configs), main)[0]


def test_hosts_of_a_rack_follow_each_other_so_that_a_ring_enters_it_once() -> None:
    racks = ["a", "b", "a", "b"]
    found = in_order([RunConfig(hostname=f"h{n}", rack=rack) for n, rack in enumerate(racks)])
    assert found.hosts == ((0,), (2,), (1,), (3,))
    assert found.racks == (0, 0, 1, 1)
    assert found.hosts_per_rack == 2
    assert found.of_subset([0, 1, 2]).racks == (0, 0, 1)
    assert found.of_subset([0, 1, 2]).hosts_per_rack is None


def test_hosts_fill_the_racks_of_a_cluster_file_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_text(LabDesign("lab", 4, 2, 125e6, 4.0).cluster()))
    order = ("h3", "h1", "h2", "h0")
    configs = [RunConfig(hostname=f"h{n}", host_order=order) for n in range(4)]
    found = in_order([with_cluster(config, str(file)) for config in configs])
    assert found.hosts == ((3,), (1,), (2,), (0,))
    assert found.racks == (0, 0, 1, 1)


def test_without_racks_the_order_of_ranks_stays() -> None:
    found = in_order([RunConfig(hostname=f"h{n}") for n in range(3)])
    assert found.hosts == ((0,), (1,), (2,))
    assert found.racks == ()


def test_another_order_on_another_host_is_refused() -> None:
    configs = [RunConfig(hostname=f"h{n}", host_order=(f"h{n}",)) for n in range(2)]
    with pytest.raises(BadInput, match="SHOAL_HOST_ORDER differs between ranks"):
        in_order(configs)


@pytest.mark.skipif(not is_built(), reason="the native part is not built")
def test_sums_of_two_racks_cross_between_them_only_as_slices() -> None:
    numel = 400_000

    def body(transport: TcpTransport) -> torch.Tensor:
        other = TcpTransport(transport.engine, None, "ring", 20.0)
        between = TcpInterHost(transport, other, rack=2)
        data = torch.arange(numel, dtype=torch.float32) + transport.rank
        between.run(Call("all_reduce", data, data))
        return data

    for total in on_tcp(4, body):
        assert torch.equal(total, 4 * torch.arange(numel, dtype=torch.float32) + 6)


def test_a_named_ring_enters_each_rack_once_and_so_does_that_of_some_of_its_ranks() -> None:
    ring = Ordered("ring", (0, 2, 1, 3))
    assert sent_to(ring, 4) == {(0, 2), (2, 1), (1, 3), (3, 0)}
    choice = for_subset({"all_reduce": ring}, [0, 1, 2])
    assert choice == {"all_reduce": Ordered("ring", (0, 2, 1))}
    star = AlgorithmSelector({"all_reduce": Ordered("star", (1, 0))}, 0, 2)
    prove(star.program("all_reduce", 8, Link()).collective)


def sent_to(algorithm: Ordered, ranks: int) -> set[tuple[int, int]]:
    selector = AlgorithmSelector({"all_reduce": algorithm}, 0, ranks)
    collective = selector.program("all_reduce", 1 << 20, Link()).collective
    prove(collective)
    return {(transfer.src, transfer.dst) for row in collective.rounds for transfer in row}
