"""Nodes that are connected directly, for scenarios that are written out."""

from __future__ import annotations

from collections import deque
from typing import Any

from shoal.server.chain import ChainConfig
from shoal.server.chain.messages import Apply, ChangeConfig, Effect, Reset, Send, SendSnapshot
from shoal.server.chain.node import ChainNode


class Wire:
    """Nodes and what is under way between them; `down` get and send nothing."""

    def __init__(self, *nodes: ChainNode):
        self.nodes = {node.me: node for node in nodes}
        self.states: dict[int, list[Any]] = {node.me: [] for node in nodes}
        self.asked: list[ChainConfig] = []
        self.resets: list[int] = []
        self.down: set[int] = set()
        self._queue: deque[tuple[int, Send]] = deque()

    def do(self, me: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._queue.append((me, effect))
            elif isinstance(effect, Apply):
                self.states[me].append(effect.entry.op)
            elif isinstance(effect, ChangeConfig):
                self.asked.append(effect.config)
            elif isinstance(effect, SendSnapshot):
                self.states[effect.to] = list(self.states[me])
                self.do(effect.to, self.nodes[effect.to].install(effect.position))
            elif isinstance(effect, Reset):
                self.resets.append(me)

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
