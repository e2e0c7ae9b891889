"""Each mistake is found; the chain as it is passes the same schedules and scenarios."""

from __future__ import annotations

import pytest

from shoal.server.chain import ChainConfig
from shoal.server.chain.messages import Append
from shoal.server.chain.node import ChainNode
from tests.server.chain.mutations import MUTATIONS, AcceptsLowerEpochs, ConfirmsWhileAdding
from tests.server.chain.wire import Wire
from tests.server.chain.world import first_broken

FOUND_SOON = (
    "the head acknowledges before the tail has it",
    "the tail commits alone while it adds a learner",
    "pushes are not deduplicated",
    "a snapshot lacks the table of pushes",
)


@pytest.mark.parametrize("mistake", FOUND_SOON)
def test_these_mistakes_are_found_within_100_schedules(mistake: str) -> None:
    assert first_broken(range(100), replica_type=MUTATIONS[mistake]) is not None


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", MUTATIONS)
def test_every_mistake_is_found_within_10_000_schedules(mistake: str) -> None:
    assert first_broken(range(10_000), replica_type=MUTATIONS[mistake]) is not None


# ---------------------------------------------------------------------- too rare for chance


def two_lives(node_type: type[ChainNode]) -> list[list[str]]:
    """An entry of a head that died reaches a replica's next life, behind the head's next life."""
    wire = Wire(*(node_type(me, 1, "strong", 3) for me in range(3)))
    config = ChainConfig(1, (0, 1, 2), (1, 1, 1))
    wire.reconfigure(config)
    wire.propose(0, "a")
    wire.settle()
    late = Append(1, 2, 1, "never replicated")
    for lost in (0, 1):
        config = config.without({lost})
        wire.restart(node_type(lost, 2, "strong", 3))
        wire.reconfigure(config)
        config = wire.asked[-1]
        wire.reconfigure(config)
    wire.do(1, wire.nodes[1].receive(0, late))
    wire.propose(2, "b")
    wire.settle()
    return [wire.states[me] for me in range(3)]


def test_without_epochs_an_entry_of_an_earlier_life_would_be_taken() -> None:
    assert two_lives(ChainNode) == [["a", "b"]] * 3
    assert two_lives(AcceptsLowerEpochs)[1] == ["a", "never replicated"]


def read_beside_a_tail_that_adds(node_type: type[ChainNode]) -> bool:
    """Whether a replica that has been removed, with the tail, is allowed to read.

    The tail has asked for a learner and knows no answer. In truth the learner was added, and has
    removed the other two: it commits alone.
    """
    wire = Wire(*(node_type(me, 1, "strong", 3) for me in range(3)))
    wire.reconfigure(ChainConfig(1, (0, 1), (1, 1)))
    assert wire.asked == [ChainConfig(2, (0, 1, 2), (1, 1, 1))]
    for config in (wire.asked[0], wire.asked[0].without({0, 1})):
        wire.do(2, wire.nodes[2].reconfigure(config))
    wire.propose(2, "a")
    assert wire.states[2] == ["a"]
    wire.down.add(2)
    number, effects = wire.nodes[0].ask()
    wire.do(0, effects)
    wire.settle()
    return wire.nodes[0].is_confirmed(number)


def test_a_tail_that_may_have_been_replaced_confirms_nothing() -> None:
    assert not read_beside_a_tail_that_adds(ChainNode)
    assert read_beside_a_tail_that_adds(ConfirmsWhileAdding)
