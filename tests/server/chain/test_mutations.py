"""Each mistake is found; the chain as it is passes the same schedules and scenarios."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from shoal.server.chain import ChainConfig, Entry
from shoal.server.chain.messages import Append, ChangeConfig, Effect, Send, SendSnapshot
from shoal.server.chain.node import ChainNode
from tests.server.chain.mutations import MUTATIONS, AcceptsLowerEpochs, ConfirmsWhileAdding
from tests.server.chain.world import first_broken


class Wire:
    """Nodes and what is under way between them; `down` get and send nothing."""

    def __init__(self, *nodes: ChainNode):
        self.nodes = {node.me: node for node in nodes}
        self.states: dict[int, list[Any]] = {node.me: [] for node in nodes}
        self.asked: list[ChainConfig] = []
        self.down: set[int] = set()
        self._queue: deque[tuple[int, Send]] = deque()

    def do(self, me: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._queue.append((me, effect))
            elif isinstance(effect, Entry):
                self.states[me].append(effect.op)
            elif isinstance(effect, ChangeConfig):
                self.asked.append(effect.config)
            elif isinstance(effect, SendSnapshot):
                self.states[effect.to] = list(self.states[me])
                self.do(effect.to, self.nodes[effect.to].install(effect.position))

    def settle(self) -> None:
        while self._queue:
            sender, send = self._queue.popleft()
            if sender not in self.down and send.to not in self.down:
                self.do(send.to, self.nodes[send.to].receive(sender, send.message))

    def restart(self, node: ChainNode) -> None:
        """A node without state takes the place of the one with its number."""
        self.nodes[node.me] = node
        self.states[node.me] = []
        self.down.discard(node.me)

    def propose(self, me: int, op: Any) -> int:
        position, effects = self.nodes[me].propose(op)
        self.do(me, effects)
        return position

    def reconfigure(self, config: ChainConfig) -> None:
        for me, node in self.nodes.items():
            if me not in self.down:
                self.do(me, node.reconfigure(config))
        self.settle()


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
