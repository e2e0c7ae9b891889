"""What a member may say about its state.

handler ── read ──> what it has seen is committed; the lease counts

A replica applies what it gets before it is committed. So an answer waits for the commitment of all
that it may have seen: else the loss of this replica could undo it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from shoal.server.chain.node import ChainNode
from shoal.server.chain.state import Fenced
from shoal.server.replicas.core import ReplicaCore
from shoal.server.replicas.waits import await_change

T = TypeVar("T")


class Reads:
    """Threads of handlers that read the state of a replica, or wait until they may."""

    def __init__(self, core: ReplicaCore):
        self._core = core

    def read(self, action: Callable[[], T]) -> T:
        """What a member reads, with all that was logged at this moment; it is committed.

        An eventual one does not wait for that, and lacks what has not arrived. It is a member
        still: so it lacks at most what a head may be ahead of its tail.
        """
        node = self.catch_up()
        result = action()
        self.confirm(node)
        return result

    def catch_up(self) -> ChainNode:
        """Wait until all that is logged now is applied, by the node that is returned."""
        core = self._core
        with core.changed:
            node = core.node
            upto = node.position
            await_change(core, lambda: core.applied >= upto, node)
            return node

    def await_committed(self) -> None:
        """Wait until all that has been applied here is committed."""
        core = self._core
        with core.changed:
            self._await_committed(core.node)

    def _await_committed(self, node: ChainNode) -> None:
        if node.consistency == "strong":
            upto = node.position
            await_change(self._core, lambda: node.committed >= upto, node)

    def confirm(self, node: ChainNode) -> None:
        """What was read under this node was no old value: by the lease, or by asking all members.

        Elsewhere if it has been replaced: a later life of this replica says nothing about it.
        """
        core = self._core
        with core.changed:
            if node is not core.node:
                raise core.elsewhere("was removed from its chain")
            self._await_committed(node)
            if core.lease.is_valid(node.epoch, time.monotonic()) and node.is_member:
                return
            try:
                number, effects = node.ask()
                core.run(effects)
                again = partial(node.ask_again, number)  # an answer may have been lost
                await_change(core, lambda: node.is_confirmed(number), node, again)
            except Fenced as error:
                raise core.elsewhere("was removed from its chain") from error
