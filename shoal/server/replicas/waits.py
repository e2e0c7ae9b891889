"""How threads of handlers wait for the chain: with a limit, and only while their node lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainNode
from shoal.server.model.membership import ModelFailure
from shoal.server.replicas.core import ReplicaCore
from shoal.server.replicas.waiters import Outcome, Waiter

COMMIT_S = 120.0  # an operation that is not committed after so long ends the run
_AGAIN_S = 1.0


def await_outcome(core: ReplicaCore, waiter: Waiter) -> Outcome:
    """Without the lock; Elsewhere if this replica loses its place meanwhile."""
    deadline_s = time.monotonic() + COMMIT_S
    while not waiter.woken.acquire(timeout=1.0):
        _check_waiting(core, waiter.node, deadline_s)
    if waiter.outcome is None:
        _check_waiting(core, waiter.node, deadline_s)
        raise core.elsewhere("was removed from its chain")
    return waiter.outcome


def await_change(
    core: ReplicaCore,
    is_ready: Callable[[], bool],
    node: ChainNode,
    again: Callable[[], list[Effect]] = list,
) -> None:
    """Under the lock; Elsewhere if this replica loses its place meanwhile. `again` is what to
    do every second, however often something has changed."""
    deadline_s = time.monotonic() + COMMIT_S
    again_s = time.monotonic() + _AGAIN_S
    while not is_ready():
        _check_waiting(core, node, deadline_s)
        core.changed.wait(max(0.0, again_s - time.monotonic()))
        if time.monotonic() >= again_s:
            again_s = time.monotonic() + _AGAIN_S
            effects = again()
            if effects:
                core.run(effects)


def whom(core: ReplicaCore) -> str:
    """Which process an operation waits for."""
    successor = core.node.successor
    return "the coordinator" if successor is None else core.place.other_in_words(successor)


def _check_waiting(core: ReplicaCore, node: ChainNode, deadline_s: float) -> None:
    """Elsewhere if this replica has lost its place since."""
    if core.is_closed:
        raise ModelFailure("the server was stopped")
    if node is not core.node:
        raise core.elsewhere("was removed from its chain")
    if time.monotonic() > deadline_s:
        raise ModelFailure(f"{whom(core)} has not answered for {COMMIT_S:.0f} s")
