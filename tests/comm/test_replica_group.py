"""The workers of one replica: barriers and broadcasts from their leader."""

from __future__ import annotations

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh, ReplicaGroup
from shoal.strategy.strategy import Layout
from tests.conftest import World


def test_every_replica_gets_what_its_own_leader_has(world: World) -> None:
    def body(group: Group) -> tuple[int, int, bool, list[int]]:
        mesh = Mesh.of(group, Layout(replicas=2, tp=2, pp=2))
        replica_group = mesh.replica_group
        received = replica_group.broadcast_integers([group.rank, 10 * group.rank])
        return replica_group.rank, replica_group.size, replica_group.is_leader, received

    expected = [(rank, 4, rank == 0, [0, 0]) for rank in range(4)]
    assert world(8, body) == expected + [(rank, 4, rank == 0, [4, 40]) for rank in range(4)]


def test_a_barrier_waits_for_all_workers(world: World) -> None:
    came: list[int] = []

    def body(group: Group) -> int:
        mesh = Mesh.of(group, Layout(replicas=1, tp=2, pp=3))
        replica_group = mesh.replica_group
        found = []
        for _ in range(20):
            came.append(group.rank)
            replica_group.barrier()
            found.append(len(came))
            replica_group.barrier()
        return found == [6 * (turn + 1) for turn in range(20)]

    assert all(world(6, body))


def test_one_worker_is_a_whole_replica() -> None:
    replica_group = ReplicaGroup()
    replica_group.barrier()
    assert (replica_group.rank, replica_group.size) == (0, 1)
    assert replica_group.broadcast_integers([7]) == [7]
