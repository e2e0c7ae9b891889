"""Operations of this replica's workers, while it is the head.

handler ── execute ──> node.propose ──> apply, successor … tail ──> Acked ──> answer
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.runtime.waits import waiting
from shoal.server.chain.node import ChainNode
from shoal.server.chain.state import Fenced, NotHead
from shoal.server.model.membership import ModelFailure
from shoal.server.replicas.core import ReplicaCore, pass_push
from shoal.server.replicas.operations import EARLY, EMPTY, OnCommitted, Operation, Payload
from shoal.server.replicas.waiters import Waiter
from shoal.server.replicas.waits import await_change, await_outcome, whom
from shoal.server.replicas.wire import Proposed


class Proposals:
    """`confirm` says that what was applied under a node is no old state."""

    def __init__(self, core: ReplicaCore, confirm: Callable[[ChainNode], None]):
        self._core = core
        self._confirm = confirm
        self._in_words = core.place.in_words()
        self._whom = partial(whom, core)
        self._is_eventual = core.place.consistency == "eventual"

    def execute(
        self,
        operation: Operation,
        payload: Payload = EMPTY,
        on_committed: OnCommitted | None = None,
    ) -> Any:
        """Propose, wait until it is committed and applied here, return the answer.

        `on_committed(answer)` is called before, by the thread that notices it; it may not wait. It
        is not called where the answer is an error, or eventual.
        """
        with self._core.changed:
            waiter = self._propose(Proposed(operation, payload), on_committed)
        self._core.apply_upto(waiter.position)
        with waiting(self._in_words, self._whom, f"the commitment of {type(operation).__name__}"):
            outcome = await_outcome(self._core, waiter)
            if outcome.error is None and not isinstance(operation, EARLY):
                self._await_committed(waiter)
        if outcome.error is not None:
            raise outcome.error
        if self._is_eventual:
            self._confirm(waiter.node)
        return outcome.answer

    def _propose(self, proposed: Proposed, on_committed: OnCommitted | None) -> Waiter:
        core = self._core
        node = core.node
        if core.is_closed:
            raise ModelFailure("the server was stopped")
        try:
            if not node.has_room:
                await_change(core, lambda: node.has_room, node)
            position, effects = node.propose(proposed)
        except (NotHead, Fenced) as error:
            raise core.elsewhere("is not the head of its chain") from error
        if self._is_eventual:
            on_committed = None
        waiter = core.waiters.add(Waiter(node, position, self._is_eventual, on_committed))
        pass_push("push.logged", proposed.operation)
        core.run(effects)
        return waiter

    def _await_committed(self, waiter: Waiter) -> None:
        """An eventual head waits for the others with all but pushes."""
        if self._is_eventual:
            core = self._core
            with core.changed:
                await_change(core, lambda: waiter.node.committed >= waiter.position, waiter.node)
