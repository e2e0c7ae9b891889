"""What is particular to groups over several hosts; the rest is in the conformance suite."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.transport.shm.messages import ANY_SOURCE
from shoal.transport.shm.segment import is_built
from tests.comm.hosts import on_hosts

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")


def test_hosts_are_numbered_in_the_order_of_ranks() -> None:
    topology = Topology.of([b"x", b"y", b"x", b"z", b"y"], 4)
    assert topology.hosts == ((0, 2), (1, 4), (3,))
    assert (topology.host, topology.index, topology.local, topology.size) == (1, 1, (1, 4), 5)
    assert not topology.is_even and Topology.of([b"x", b"y"], 0).is_even


def test_the_host_can_be_named() -> None:
    assert len({host_id(), host_id("a"), host_id("b")}) == 3


@pytest.mark.parametrize("between", ["tcp", "gloo"])
@pytest.mark.parametrize("where", ["abab", "aab"])
def test_integers_of_16_bits_are_summed_though_gloo_has_none(where: str, between: str) -> None:
    size = len(where)

    def work(group: Group) -> list[torch.Tensor]:
        data = torch.full((50_001,), group.rank, dtype=torch.int16)
        group.all_reduce(data).wait()
        piece = torch.empty(50_001, dtype=torch.int16)
        group.reduce_scatter(piece, torch.ones(size, 50_001, dtype=torch.int16)).wait()
        group.reduce(piece, 0).wait()
        return [data.unique(), piece.unique()]

    found = on_hosts(where, work, between=between)
    assert [data.tolist() for data, _ in found] == [[size * (size - 1) // 2]] * size
    assert found[0][1].tolist() == [size * size]


def test_a_receive_from_one_rank_after_one_from_any_source_gets_its_message() -> None:
    """Rank 0 hears its neighbour first, while Gloo still listens for any rank."""

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
        for source in (ANY_SOURCE, 2, 3, 3, ANY_SOURCE):
            if source > 0:
                sent = group.send(torch.zeros(1), source, tag=1)
            elif found:
                sent = group.send(torch.zeros(1), 2, tag=1)
            data = torch.empty(1)
            message = group.recv(data, source)
            message.wait()
            if source > 0 or found:
                sent.wait()
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
