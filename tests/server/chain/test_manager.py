"""Which replica asks the coordinator for which configuration."""

from __future__ import annotations

import pytest

from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import ChainManager, Fetch, ReadLease, Swap, who_leaves
from shoal.server.chain.node import ChainNode

THREE = ChainConfig(5, (0, 1, 2), (1, 1, 1))
LATER_S = 10.0


def manager_of(me: int, incarnation: int = 1) -> ChainManager:
    """It has had its lease for long."""
    manager = ChainManager(ChainNode(me, incarnation, replicas=3), founders=(0, 1, 2))
    manager.lease.granted(0.0, 0.5)
    return manager


def knows(manager: ChainManager, config: ChainConfig | None, alive: dict[int, int]) -> None:
    request = manager.next_request(LATER_S)
    assert isinstance(request, Fetch)
    manager.fetched(request, config, 0 if config is None else 40 + config.epoch, alive)


def trusted(manager: ChainManager, config: ChainConfig, alive: dict[int, int]) -> None:
    """It has also seen an epoch begin since its lease did."""
    knows(manager, ChainConfig(config.epoch - 1, config.members, config.incarnations), alive)
    manager.look()
    knows(manager, config, alive)


def test_when_all_have_lost_their_leases_the_first_to_return_removes_none_at_once() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 1: 1, 2: 1})
    manager.lease.lost()
    manager.lease.granted(LATER_S, 0.5)
    manager.look()
    knows(manager, THREE, {0: 1})
    assert manager.next_request(LATER_S + 0.4) == Swap(THREE.renewed(), 45)
    assert manager.next_request(LATER_S + 0.6) == Swap(THREE.without({1, 2}), 45)


def apart(*pairs: tuple[int, int]) -> dict[int, tuple[int, ...]]:
    both = [*pairs, *((b, a) for a, b in pairs)]
    return {a: tuple(y for x, y in both if x == a) for a, _ in both}


@pytest.mark.parametrize(
    "unreachable, leaves",
    [
        ({}, None),
        (apart((0, 1)), 1),
        (apart((1, 2)), 2),
        (apart((0, 2)), None),  # they are no neighbours
        (apart((0, 1), (0, 2)), 0),
        (apart((0, 1), (1, 2)), 1),
        (apart((0, 2), (1, 2)), 2),
        (apart((0, 1), (0, 2), (1, 2)), 2),
        ({0: (1,)}, None),  # the other may have died, or does not know it yet
        (apart((0, 3), (1, 3)), None),  # a learner
    ],
)
def test_who_leaves_where_neighbours_do_not_reach_each_other(
    unreachable: dict[int, tuple[int, ...]], leaves: int | None
) -> None:
    assert who_leaves((0, 1, 2), unreachable) == leaves


def test_a_lease_counts_from_before_it_was_asked_for_and_ends_before_the_coordinators() -> None:
    lease = ReadLease()
    lease.granted(10.0, 0.5)
    lease.saw(4, lease.number)
    assert lease.is_valid(5, 10.4)
    assert not lease.is_valid(5, 10.46)
    lease.renewed(10.3, 0.5)
    assert lease.is_valid(5, 10.7)
    lease.lost()
    assert not lease.is_valid(5, 10.7)
    lease.renewed(10.6, 0.5)  # of a lease that holds no key yet
    lease.saw(4, lease.number)
    assert not lease.is_valid(5, 10.7)
