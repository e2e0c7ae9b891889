"""Schedules of crashes, pauses, cuts, late and repeated messages: what is promised holds."""

from __future__ import annotations

import random
from itertools import pairwise, permutations
from typing import ClassVar

import pytest

from shoal.server.chain import ChainConfig
from shoal.server.chain import node as node_module
from shoal.server.chain.manager import FOUNDING_S, ChainManager, Fetch, ReadLease, Swap, who_leaves
from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainConsistency, ChainNode
from tests.server.chain.history import NEVER, Added, Observed, violation
from tests.server.chain.replica import Replica
from tests.server.chain.world import Broken, World, first_broken, run_all

STRONG = 120
EVENTUAL = 50


def test_a_strong_chain_loses_nothing_repeats_nothing_and_reads_are_linearizable() -> None:
    assert run_all(range(STRONG)) > 0.95 * STRONG


def test_an_eventual_chain_counts_what_it_loses() -> None:
    assert run_all(range(EVENTUAL), consistency="eventual") > 0.95 * EVENTUAL


class Compared(Replica):
    """After every event, all members are compared with the head of their epoch."""

    lags: ClassVar[set[int]] = set()

    def do(self, effects: list[Effect]) -> None:
        super().do(effects)
        members = [r.node for r in self.world.replicas if r.node.is_member]
        for head in (node for node in members if node.is_head):
            applied = min(node.position for node in members if node.epoch == head.epoch)
            self.lags.add(head.position - applied)
            if head.position - applied > node_module.MAX_LAG:
                raise Broken(f"a copy lacks {head.position - applied} operations of its head")


class NeverWaits(ChainNode):
    has_room = True


class ComparedThatNeverWaits(Compared):
    node_type = NeverWaits


def test_no_copy_of_an_eventual_chain_is_further_behind_than_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert node_module.MAX_LAG == 64, "as docs/chain.md and docs/parameter-server.md say"
    monkeypatch.setattr(node_module, "MAX_LAG", 3)
    seeds = range(30)
    assert run_all(seeds, consistency="eventual", replica_type=Compared) > 25
    assert max(Compared.lags) == 3
    broken = first_broken(seeds, consistency="eventual", replica_type=ComparedThatNeverWaits)
    assert broken is not None
    assert "a copy lacks 4 operations" in broken


def test_learners_that_fall_behind_what_is_kept_for_them_get_there_in_the_end() -> None:
    worlds = [World(seed, max_weight=1) for seed in range(60)]
    assert sum(world.run() for world in worlds) > 0.95 * len(worlds)
    assert sum(world.given_up for world in worlds) > 5


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("part", "consistency"),
    [*((i, "strong") for i in range(10)), *((i, "eventual") for i in range(3))],
)
def test_10_000_schedules_of_a_strong_chain_and_3_000_of_an_eventual_one(
    part: int, consistency: ChainConsistency
) -> None:
    seeds = range(1000 * part + 1000, 1000 * part + 2000)
    assert run_all(seeds, consistency=consistency) > 950


def test_pushes_go_on_while_two_neighbours_do_not_reach_each_other() -> None:
    """The cut does not end before the pushes are done."""
    worlds = (World(seed, faults=("restart_worker",)) for seed in range(50))
    world = next(world for world in worlds if world.founders == (0, 1, 2))
    world.loop.after(0.01, world.network.cut, 0, 1, 1000.0)
    world.loop.run(3.0, lambda: all(worker.is_done for worker in world.workers))
    assert all(worker.is_done for worker in world.workers)
    config = world.coordinator.store.config
    assert config is not None
    assert (0, 1) not in pairwise(config.members)
    world.network.heal()
    assert world.run()


def test_a_seed_is_one_schedule() -> None:
    first, second = World(3), World(3)
    for world in (first, second):
        world.run()
    assert (first.pushes, first.reads, first.log) == (second.pushes, second.reads, second.log)


def test_the_world_has_what_it_is_meant_to_have() -> None:
    """Over some seeds: failovers, epochs with one more member, reads with and without a lease."""
    epochs = reads = failovers = added = 0
    for seed in range(40):
        world = World(seed)
        world.run()
        config = world.coordinator.store.config
        assert config is not None
        epochs += config.epoch
        reads += sum(len(r) for r in world.reads.values())
        failovers += len(world.coordinator.store.heads) > 1
        added += any(config.incarnation_of(m) > 1 for m in config.members)
    assert epochs > 80
    assert reads > 100
    assert failovers > 5
    assert added > 10


# ---- which replica asks for which configuration


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


def test_a_founder_that_was_lost_before_the_first_epoch_is_left_out_after_a_while() -> None:
    manager = manager_of(1)
    knows(manager, None, {1: 1, 2: 4})
    assert manager.next_request(FOUNDING_S) is None
    first = ChainConfig(1, (1, 2), (1, 4))
    assert manager.next_request(FOUNDING_S + 0.5) == Swap(first, 0)
    other = manager_of(2, incarnation=4)
    knows(other, None, {1: 1, 2: 4})
    assert other.next_request(FOUNDING_S + 0.5) is None  # it is for the first that is there


def test_all_founders_begin_as_soon_as_they_are_there() -> None:
    manager = manager_of(0)
    knows(manager, None, {0: 1, 1: 1, 2: 4})
    assert manager.next_request(0.1) == Swap(ChainConfig(1, (0, 1, 2), (1, 1, 4)), 0)


def test_when_all_have_lost_their_leases_the_first_to_return_removes_none_at_once() -> None:
    manager = manager_of(0)
    trusted(manager, THREE, {0: 1, 1: 1, 2: 1})
    manager.lease.lost()
    manager.lease.granted(LATER_S, 0.5)
    manager.look()
    knows(manager, THREE, {0: 1})
    assert manager.next_request(LATER_S + 0.4) == Swap(THREE.without(), 45)
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


# ---- the history checker


VALUES = [0, 1, 4, 5] * 6 + [2, 16]  # a push twice, and one that never was


def test_it_agrees_with_a_search_over_all_orders() -> None:
    rng = random.Random(1)
    verdicts = []
    for _ in range(300):
        added, observed = _random_history(rng)
        verdicts.append(_some_order_explains(added, observed))
        assert (violation(added, observed) is None) == verdicts[-1], (added, observed)
    assert 50 < sum(verdicts) < 250


def _random_history(rng: random.Random) -> tuple[list[Added], list[Observed]]:
    def span() -> tuple[float, float]:
        begin_s, end_s = sorted(rng.sample(range(12), 2))
        return float(begin_s), float(end_s)

    added = [Added(push, *span()) for push in range(2)]
    added = [Added(a.push, a.invoked_s, NEVER) if rng.random() < 0.2 else a for a in added]
    return added, [Observed(rng.choice(VALUES), *span()) for _ in range(rng.randint(1, 3))]


def _some_order_explains(added: list[Added], observed: list[Observed]) -> bool:
    """Wing & Gong by brute force; a push without an answer may also be left out."""
    lost = [a for a in added if a.returned_s == NEVER]
    for left_out in range(1 << len(lost)):
        gone = {a.push for i, a in enumerate(lost) if left_out >> i & 1}
        kept = [a for a in added if a.push not in gone]
        if any(_explains(order) for order in permutations([*kept, *observed])):
            return True
    return False


def _explains(order: tuple[Added | Observed, ...]) -> bool:
    value = 0
    latest_s = -NEVER
    for operation in order:
        if operation.returned_s < latest_s:
            return False
        latest_s = max(latest_s, operation.invoked_s)
        if isinstance(operation, Added):
            value += 1 << 2 * operation.push
        elif operation.value != value:
            return False
    return True
