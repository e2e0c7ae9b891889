"""The workers of one replica: the first hears of all, and all hear of the first."""

from __future__ import annotations

from shoal.comm.fellows import Fellows
from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.strategy.strategy import Layout
from tests.conftest import World


def test_every_replica_hears_its_own_first_worker(world: World) -> None:
    def body(group: Group) -> tuple[int, int, bool, list[int]]:
        mesh = Mesh.of(group, Layout(replicas=2, tp=2, pp=2))
        fellows = Fellows(mesh.pp, mesh.tp)
        told = fellows.tell_numbers([group.rank, 10 * group.rank])
        return fellows.part, fellows.parts, fellows.is_first, told

    expected = [(part, 4, part == 0, [0, 0]) for part in range(4)]
    assert world(8, body) == expected + [(part, 4, part == 0, [4, 40]) for part in range(4)]


def test_nobody_goes_on_before_all_have_come(world: World) -> None:
    came: list[int] = []

    def body(group: Group) -> int:
        mesh = Mesh.of(group, Layout(replicas=1, tp=2, pp=3))
        fellows = Fellows(mesh.pp, mesh.tp)
        found = []
        for _ in range(20):
            came.append(group.rank)
            fellows.gather()
            found.append(len(came))
            fellows.gather()
        return found == [6 * (turn + 1) for turn in range(20)]

    assert all(world(6, body))


def test_one_worker_is_a_whole_replica() -> None:
    fellows = Fellows()
    fellows.gather()
    assert (fellows.part, fellows.parts, fellows.tell_numbers([7])) == (0, 1, [7])
