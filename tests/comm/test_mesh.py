"""A mesh: who is on which line of the grid, and the workers of one replica."""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh, ReplicaGroup
from shoal.strategy.strategy import Layout
from tests.conftest import World


def test_tp_is_innermost_and_replicas_are_outermost() -> None:
    layout = Layout(replicas=2, tp=2, pp=2)
    dp, pp, tp = (layout.lines(axis) for axis in ("dp", "pp", "tp"))
    assert tp == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pp == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dp == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_experts_and_sequences_lie_between_stages_and_tensors() -> None:
    layout = Layout(replicas=2, tp=2, pp=1, ep=2, cp=2)
    assert layout.lines("cp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.lines("ep")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert layout.lines("dp", "ep") == [[n, n + 4, n + 8, n + 12] for n in range(4)]


def test_every_rank_is_on_one_line_of_each_axis(world: World) -> None:
    def body(group: Group) -> Any:
        mesh = Mesh.of(group, Layout(replicas=2, tp=1, pp=2))
        sums = []
        for axis in (mesh.dp, mesh.pp, mesh.tp):
            data = torch.tensor([2.0**group.rank])
            axis.all_reduce(data).wait()
            sums.append(int(data))
        return (mesh.dp.rank, mesh.pp.rank, mesh.tp.rank), sums

    assert world(4, body) == [
        ((0, 0, 0), [0b0101, 0b0011, 0b0001]),
        ((0, 1, 0), [0b1010, 0b0011, 0b0010]),
        ((1, 0, 0), [0b0101, 0b1100, 0b0100]),
        ((1, 1, 0), [0b1010, 0b1100, 0b1000]),
    ]


def test_an_axis_over_the_whole_world_is_the_world(world: World) -> None:
    def body(group: Group) -> None:
        mesh = Mesh.of(group, Layout(replicas=1, tp=1, pp=2))
        assert mesh.pp is group
        assert mesh.dp.size == 1 and mesh.tp.size == 1

    world(2, body)


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
