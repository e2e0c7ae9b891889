"""Groups over several hosts and racks: what is not in the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.cluster.toml_file import cluster_text
from shoal.comm.call import Call
from shoal.comm.executors.hierarchical.tcp_links import TcpInterHost
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.scheduled import AlgorithmSelector, Ordered, for_subset
from shoal.comm.group import Group
from shoal.comm.network import HostNetwork, in_ring_order
from shoal.comm.transport.shm.messages import ANY_SOURCE
from shoal.comm.transport.tcp.transport import TcpTransport, is_built
from shoal.commands.run import with_cluster
from shoal.errors import BadInput, PeerLost
from shoal.launch.lab.design import LabDesign
from shoal.runtime.config import RunConfig
from shoal.schedules.collectives.cost import Link
from shoal.schedules.collectives.proof import prove
from tests.comm.threads import Table, on_hosts, on_ranks, on_tcp

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")


def test_hosts_are_numbered_in_the_order_of_ranks() -> None:
    topology = Topology.of([b"x", b"y", b"x", b"z", b"y"], 4)
    assert topology.hosts == ((0, 2), (1, 4), (3,))
    assert (topology.host, topology.index, topology.local, topology.size) == (1, 1, (1, 4), 5)
    assert not topology.is_even and Topology.of([b"x", b"y"], 0).is_even


@pytest.mark.parametrize("where", ["abab", "aab"])
def test_integers_of_16_bits_are_summed(where: str) -> None:
    size = len(where)

    def work(group: Group) -> list[torch.Tensor]:
        data = torch.full((50_001,), group.rank, dtype=torch.int16)
        group.all_reduce(data).wait()
        piece = torch.empty(50_001, dtype=torch.int16)
        group.reduce_scatter(piece, torch.ones(size, 50_001, dtype=torch.int16)).wait()
        group.reduce(piece, 0).wait()
        return [data.unique(), piece.unique()]

    found = on_hosts(where, work)
    assert [data.tolist() for data, _ in found] == [[size * (size - 1) // 2]] * size
    assert found[0][1].tolist() == [size * size]


def test_a_receive_from_one_rank_after_one_from_any_source_gets_its_message() -> None:
    """Rank 0 hears its neighbour first, while it still listens for any rank."""

    def work(group: Group) -> list[tuple[int, float]]:
        if group.rank == 1:
            group.send(torch.tensor([1.0]), 0).wait()
        elif group.rank >= 2:
            token = torch.zeros(1)
            for number in range(2):
                group.recv(token, 0, tag=1).wait()
                group.send(torch.tensor([10.0 * group.rank + number]), 0).wait()
        if group.rank:
            return []
        found = []
        for source, asked in ((ANY_SOURCE, 0), (2, 2), (3, 3), (3, 3), (ANY_SOURCE, 2)):
            if asked:
                group.send(torch.zeros(1), asked, tag=1).wait()
            data = torch.empty(1)
            message = group.recv(data, source)
            message.wait()
            found.append((message.source, float(data)))
        return found

    wanted = [(1, 1.0), (2, 20.0), (3, 30.0), (3, 31.0), (2, 21.0)]
    assert on_hosts("aabc", work)[0] == wanted


def test_several_receives_from_any_source_under_way() -> None:
    def work(group: Group) -> list[float]:
        if group.rank:
            for number in range(5):
                group.send(torch.tensor([10.0 * group.rank + number]), 0).wait()
            return []
        found = [torch.empty(1) for _ in range(15)]
        messages = [group.recv(data, ANY_SOURCE) for data in found]
        for message in messages:
            message.wait()
        return sorted(float(data) for data in found)

    wanted = [10.0 * rank + number for rank in (1, 2, 3) for number in range(5)]
    assert on_hosts("aabb", work)[0] == wanted


def test_receives_from_any_source_have_messages_of_a_rank_in_their_order() -> None:
    """Also where the later one is waited for first, and messages are too long to be kept."""

    def work(group: Group) -> list[float]:
        if group.rank:
            sent = [torch.full((50_000,), float(number)) for number in range(3)]
            for message in [group.send(data, 0) for data in sent]:
                message.wait()
            return []
        found = [torch.empty(50_000) for _ in range(3)]
        messages = [group.recv(data, ANY_SOURCE) for data in found]
        for message in reversed(messages):
            message.wait()
        return [float(data.mean()) for data in found]

    assert on_hosts("ab", work)[0] == [0.0, 1.0, 2.0]


def test_a_rank_that_does_not_come_is_lost_in_time() -> None:
    def work(group: Group) -> str:
        if group.rank == 2:
            return "stays away"
        try:
            group.with_timeout(0.3).all_reduce(torch.zeros(3)).wait()
        except PeerLost as error:
            return str(error)
        return "nothing was raised"

    for rank, told in enumerate(on_hosts("aab", work)[:2]):
        assert told.startswith(f"rank {rank} lost ") and "all_reduce #1 over 2 hosts" in told


# ------------------------------------------------------------------ racks


def in_order(configs: list[RunConfig]) -> Topology:
    """Of one rank on each of so many hosts."""
    table = Table(len(configs))
    hosts = tuple((rank,) for rank in range(len(configs)))

    def main(rank: int) -> Topology:
        network = HostNetwork(configs[rank])
        return in_ring_order(Topology(hosts, rank), network, table.exchange(rank))

    return on_ranks(len(configs), main)[0]


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
