"""Schedules of crashes, pauses, cuts, late and repeated messages: what is promised holds."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest

from shoal.server.chain import node as node_module
from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainConsistency, ChainNode
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
