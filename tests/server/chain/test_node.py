"""A chain of three, message by message."""

from __future__ import annotations

import pytest

from shoal.server.chain.config import ChainConfig, Entry
from shoal.server.chain.messages import (
    Acked,
    Append,
    Apply,
    Ask,
    Confirm,
    Disconnect,
    Learn,
    Refetch,
    Send,
    SendSnapshot,
    Stale,
    TooOld,
)
from shoal.server.chain.node import ChainNode
from shoal.server.chain.state import Fenced, NotHead, TooFarAhead
from tests.server.chain.wire import Wire

THREE = ChainConfig(1, (0, 1, 2))


def chain_of_three() -> Wire:
    wire = Wire(*(ChainNode(me, replicas=3) for me in range(3)))
    wire.reconfigure(THREE)
    return wire


def test_an_operation_goes_down_the_chain_and_its_acknowledgement_up() -> None:
    wire = chain_of_three()
    position, effects = wire.nodes[0].propose("a")
    assert position == 1
    append = Append(1, 1, 0, "a")
    applied = Apply(Entry(1, "a"))
    assert effects == [Send(1, append), applied], "passed on, then applied"
    assert wire.nodes[1].receive(0, append) == [Send(2, append), applied]
    assert wire.nodes[2].receive(1, append) == [applied, Send(1, Acked(1, 1))]
    assert [node.is_dirty for node in wire.nodes.values()] == [True, True, False]
    assert wire.nodes[1].receive(2, Acked(1, 1)) == [Send(0, Acked(1, 1))]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_the_survivors_have_is_committed_without_the_lost_member(lost: int) -> None:
    wire = chain_of_three()
    wire.propose(0, "a")
    wire.settle()
    effects = wire.nodes[0].propose("b")[1]
    wire.do(0, effects[1:])
    wire.do(1, wire.nodes[1].receive(0, effects[0].message))  # type: ignore[union-attr]
    wire.down.add(lost)
    wire.settle()
    config = THREE.without({lost})
    wire.reconfigure(config)
    wire.propose(config.members[0], "c")
    wire.settle()
    for me in config.members:
        assert wire.states[me] == ["a", "b", "c"]


def test_lower_epochs_are_refused_and_higher_ones_make_it_ask() -> None:
    node = chain_of_three().nodes[1]
    node.reconfigure(ChainConfig(3, (0, 1, 2)))
    assert node.receive(0, Append(1, 1, 0, "a")) == [Send(0, Stale(3))]
    assert node.receive(0, Append(4, 1, 0, "a")) == [Refetch()]
    assert node.receive(0, Stale(4)) == [Refetch()]
    assert node.receive(0, Stale(2)) == []
    assert node.position == 0


def test_a_removed_replica_is_fenced_for_ever() -> None:
    wire = chain_of_three()
    wire.reconfigure(THREE.without({0}))
    assert wire.resets == [0]
    with pytest.raises(Fenced):
        wire.nodes[0].propose("a")
    with pytest.raises(NotHead):
        wire.nodes[2].propose("a")


def test_a_learner_gets_a_snapshot_then_the_log_and_is_added_behind_the_tail() -> None:
    wire = chain_of_three()
    for op in "ab":
        wire.propose(0, op)
        wire.settle()
    wire.nodes[1] = ChainNode(1, incarnation=7, replicas=3)
    wire.states[1] = []
    wire.reconfigure(THREE.without({1}))
    assert wire.states[1] == ["a", "b"]
    assert wire.asked == [ChainConfig(3, (0, 2, 1), (0, 0, 7))]
    wire.propose(0, "c")
    wire.settle()
    assert [wire.nodes[me].committed for me in range(3)] == [2, 2, 2]  # the outcome is unknown
    assert wire.states[1] == ["a", "b"]
    wire.reconfigure(wire.asked[0])
    assert wire.states == {me: ["a", "b", "c"] for me in range(3)}


def test_an_eventual_head_applies_at_once_and_waits_when_the_tail_is_far_behind() -> None:
    wire = Wire(*(ChainNode(me, consistency="eventual", replicas=2) for me in range(2)))
    wire.reconfigure(ChainConfig(1, (0, 1)))
    wire.down.add(1)
    for op in range(64):
        wire.propose(0, op)
    assert wire.states[0] == list(range(64))
    with pytest.raises(TooFarAhead):
        wire.nodes[0].propose("one more")


def test_the_log_is_kept_for_a_learner_up_to_a_limit() -> None:
    """One whose snapshot takes too long is given up, and gets another one when it comes again."""
    tail = ChainNode(0, replicas=2)
    tail.max_weight = 3
    tail.reconfigure(ChainConfig(1, (0,)))
    for op in range(9):
        tail.propose(op)
    assert tail.receive(1, Learn(1, 7, 0)) == [SendSnapshot(1, 7, 9)]
    for op in range(3):
        assert not any(isinstance(effect, Send) for effect in tail.propose(op)[1])
    assert tail.receive(1, Learn(1, 7, 0)) == [], "its snapshot is on the way"
    assert tail.propose("one more")[1][1:] == [Send(1, TooOld(1, 7)), Disconnect(1)]
    assert tail.receive(1, Learn(1, 7, 9)) == [Send(1, TooOld(1, 7))]
    assert tail.receive(1, Learn(1, 8, 0)) == [SendSnapshot(1, 8, 13)]


def test_a_question_whose_answer_was_lost_is_asked_again() -> None:
    """Each replica connects by itself: who asked does not notice that an answer was lost."""
    node = ChainNode(0, 1)
    node.reconfigure(ChainConfig(1, (0, 1, 2), (1, 1, 1)))
    number, _ = node.ask()
    node.receive(1, Confirm(1, number))
    assert node.ask_again(number) == [Send(2, Ask(1, number))]
    node.receive(2, Confirm(1, number))
    assert node.ask_again(number) == []
    assert node.is_confirmed(number)
