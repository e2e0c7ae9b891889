"""Which replica asks the coordinator for which configuration."""

from __future__ import annotations

import pytest

from shoal.server.chain.config import ChainConfig
from shoal.server.chain.manager import ChainManager, Fetch, Swap
from shoal.server.chain.messages import Learn, Reset
from shoal.server.chain.node import ChainNode
from shoal.server.chain.reach import who_leaves
from shoal.server.chain.read_lease import ReadLease

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


def test_the_first_founder_writes_the_first_configuration_when_all_are_alive() -> None:
    first, second = manager_of(0, 11), manager_of(1, 12)
    knows(first, None, {0: 11, 1: 12})
    assert first.next_request(LATER_S) is None
    everyone = {0: 11, 1: 12, 2: 13}
    for manager in (first, second):
        manager.look()
        knows(manager, None, everyone)
    assert second.next_request(LATER_S) is None
    swap = first.next_request(LATER_S)
    assert swap == Swap(ChainConfig(1, (0, 1, 2), (11, 12, 13)), 0)
    first.swapped(swap, 41)
    assert first.node.is_head


def test_the_first_member_that_is_alive_removes_those_that_are_not() -> None:
    first, second = manager_of(1), manager_of(2)
    for manager in (first, second):
        trusted(manager, THREE, {1: 1, 2: 1})
    assert first.next_request(LATER_S) == Swap(ChainConfig(6, (1, 2), (1, 1)), 45)
    assert second.next_request(LATER_S) is None


def test_a_replica_in_its_next_life_is_not_the_member_that_it_was() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 1: 2, 2: 1})
    assert manager.next_request(LATER_S) == Swap(ChainConfig(6, (0, 2), (1, 1)), 45)


def test_who_is_alive_is_looked_up_again_after_each_new_configuration() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 2: 1})
    swap = manager.next_request(LATER_S)
    assert isinstance(swap, Swap)
    manager.swapped(swap, 46)
    assert isinstance(manager.next_request(LATER_S), Fetch)


def test_after_a_conflict_or_without_an_answer_it_looks_or_asks_again() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 2: 1})
    swap = manager.next_request(LATER_S)
    assert manager.next_request(LATER_S) == swap
    manager.conflicted()
    assert isinstance(manager.next_request(LATER_S), Fetch)


def test_when_all_have_lost_their_leases_the_first_to_return_removes_none_at_once() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 1: 1, 2: 1})
    manager.lease.lost()
    manager.lease.granted(LATER_S, 0.5)
    manager.look()
    knows(manager, THREE, {0: 1})
    assert manager.next_request(LATER_S + 0.4) == Swap(THREE.renewed(), 45)
    assert manager.next_request(LATER_S + 0.6) == Swap(THREE.without({1, 2}), 45)


def test_a_tail_repeats_what_it_has_asked_for_until_it_knows_a_later_epoch() -> None:
    manager = manager_of(1)
    alive = {0: 1, 1: 1, 2: 7}
    two = ChainConfig(5, (0, 1), (1, 1))
    trusted(manager, two, alive)
    manager.node.receive(2, Learn(5, 7, 0))
    added = Swap(ChainConfig(6, (0, 1, 2), (1, 1, 7)), 45)
    assert manager.next_request(LATER_S) == added
    assert manager.next_request(LATER_S) == added
    manager.look()
    knows(manager, two, {0: 1, 1: 1})  # the learner has died: any later epoch will do
    assert manager.next_request(LATER_S) == Swap(two.renewed(), 45)
    manager.look()
    knows(manager, two.without({0}), alive)
    assert manager.node.asked is None


def test_a_replica_that_is_no_member_says_when_all_members_are_gone() -> None:
    manager = manager_of(3)
    knows(manager, THREE, {3: 1, 1: 2})
    assert manager.all_are_lost
    manager.look()
    knows(manager, THREE, {3: 1, 1: 1})
    assert not manager.all_are_lost


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


def test_a_member_that_leaves_gives_up_its_lease_first() -> None:
    alive = {0: 1, 1: 1, 2: 1}
    managers = [manager_of(me) for me in range(3)]
    for manager in managers:
        trusted(manager, THREE, alive)
        manager.look()
        request = manager.next_request(LATER_S)
        assert isinstance(request, Fetch)
        manager.fetched(request, THREE, 45, alive, apart((0, 1)))
        manager.lease.renewed(LATER_S, 0.5)
    requests = [manager.next_request(LATER_S) for manager in managers]
    assert requests == [None, Swap(THREE.without({1}), 45), None]
    valid = [manager.lease.is_valid(5, LATER_S) for manager in managers]
    assert valid == [True, False, True]
    assert managers[1].swapped(Swap(THREE.without({1}), 45), 46) == [Reset()]


def test_a_member_does_not_leave_while_another_is_lost() -> None:
    manager = manager_of(1)
    trusted(manager, THREE, {0: 1, 1: 1})
    manager.look()
    request = manager.next_request(LATER_S)
    assert isinstance(request, Fetch)
    manager.fetched(request, THREE, 45, {0: 1, 1: 1}, apart((0, 1)))
    assert manager.next_request(LATER_S) is None


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


def test_a_new_lease_counts_only_in_an_epoch_that_began_after_it() -> None:
    lease = ReadLease()
    lease.granted(10.0, 0.5)
    assert not lease.is_valid(5, 10.1)
    lease.saw(5, lease.number - 1)  # asked before the lease began
    assert not lease.is_valid(5, 10.1)
    assert not lease.needs_epoch(5)
    lease.saw(5, lease.number)
    assert lease.needs_epoch(5)
    assert not lease.is_valid(5, 10.1)
    assert lease.is_valid(6, 10.1)
