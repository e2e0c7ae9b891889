"""A chain member as the connections of workers use it.

handler ── execute ──> node.propose ──> apply, successor … tail ──> Acked ──> answer
handler ── read ─────> what it has seen is committed; the lease counts

A member applies what it gets before it is committed. So an answer waits for the commitment of all
that it may have seen: else the loss of this member could undo it. Threads of handlers wait with a
limit, and only while their node lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from shoal.runtime import clock
from shoal.runtime.waits import waiting
from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainNode, Fenced
from shoal.server.member.core import ChainCore, Outcome, Waiter
from shoal.server.member.operations import EARLY, EMPTY, OnCommitted, Operation, Payload, Proposed
from shoal.server.member.place import ChainPlace
from shoal.server.model.membership import ModelFailure
from shoal.server.process.model_host import ModelHost

COMMIT_S = 120.0  # an operation that is not committed after so long ends the run
_AGAIN_S = 1.0
T = TypeVar("T")


class ChainRuntime(ChainCore):
    """The chain of one shard, as one of its members takes part in it."""

    def __init__(self, place: ChainPlace, host: ModelHost, on_reset: Callable[[], None]):
        """`on_reset` ends all connections of workers: this member has lost its place."""
        super().__init__(place, host, on_reset)
        self.is_eventual = place.consistency == "eventual"
        host.chain = self

    def close(self, join_s: float) -> None:
        with self.changed:
            self.is_closed = True
            self.waiters.end_all()
            self.changed.notify_all()
        for link in self.links.values():
            link.close()
        for link in self.links.values():
            link.join(join_s)

    def check_epoch(self, epoch: int) -> None:
        """Elsewhere if a worker's epoch is not the present one, or this is no member."""
        node = self.node
        if not node.is_member:
            raise self.elsewhere("is no member of its chain")
        if epoch != node.epoch:
            raise self.elsewhere(f"is in epoch {node.epoch}, and the request in epoch {epoch}")

    def execute(
        self,
        operation: Operation,
        payload: Payload = EMPTY,
        on_committed: OnCommitted | None = None,
    ) -> Any:
        """Propose, wait until it is committed and applied here, return the answer.

        `on_committed(answer)` is called before, by the thread that notices it; it may not wait.
        """
        with self.changed:
            waiter = self._propose(Proposed(operation, payload), on_committed)
        self.apply_upto(waiter.position)
        doing = f"the commitment of {type(operation).__name__}"
        with waiting(self.place.in_words(), self._awaited, doing):
            answer, error = self._await_outcome(waiter)
        if error is not None:
            raise error
        if self.is_eventual:
            self.confirm(waiter.node)
        return answer

    def _propose(self, proposed: Proposed, on_committed: OnCommitted | None) -> Waiter:
        node = self.node
        if self.is_closed:
            raise ModelFailure("the server was stopped")
        try:
            if not node.has_room:
                self._await_change(lambda: node.has_room, node)
            position, effects = node.propose(proposed)
        except Fenced as error:
            raise self.elsewhere("is not the head of its chain") from error
        is_early = self.is_eventual and isinstance(proposed.operation, EARLY)
        waiter = Waiter(node, position, is_early, None if is_early else on_committed)
        self.waiters[position] = waiter
        self.run(effects)
        return waiter

    def read(self, action: Callable[[], T]) -> T:
        """What a member reads, with all that was logged at this moment; it is committed.

        An eventual one does not wait for that: it lacks at most what a head may be ahead.
        """
        node = self.catch_up()
        result = action()
        self.confirm(node)
        return result

    def catch_up(self) -> ChainNode:
        """Wait until all that is logged now is applied, by the node that is returned."""
        with self.changed:
            node = self.node
            upto = node.position
            self._await_change(lambda: self.applied >= upto, node)
            return node

    def await_committed(self) -> None:
        """Wait until all that has been applied here is committed."""
        with self.changed:
            node = self.node
            upto = self.node.position
            if not self.is_eventual:
                self._await_change(lambda: node.committed >= upto, node)

    def confirm(self, node: ChainNode) -> None:
        """What was read under this node was no old value: by the lease, or by asking all members.

        Elsewhere if it has been replaced: a later life of this member says nothing about it.
        """
        with self.changed:
            if node is not self.node:
                raise self.elsewhere("was removed from its chain")
            self.await_committed()
            if self.lease.is_valid(node.epoch, clock.monotonic()) and node.is_member:
                return
            try:
                number, effects = node.ask()
                self.run(effects)
                again = partial(node.ask_again, number)  # an answer may have been lost
                self._await_change(lambda: node.is_confirmed(number), node, again)
            except Fenced as error:
                raise self.elsewhere("was removed from its chain") from error

    def _await_outcome(self, waiter: Waiter) -> Outcome:
        """Without the lock; Elsewhere if this member loses its place meanwhile."""
        deadline_s = clock.monotonic() + COMMIT_S
        while not waiter.woken.acquire(timeout=1.0):
            self._check_waiting(waiter.node, deadline_s)
        if waiter.outcome is None:
            self._check_waiting(waiter.node, deadline_s)
            raise self.elsewhere("was removed from its chain")
        return waiter.outcome

    def _await_change(
        self,
        is_ready: Callable[[], bool],
        node: ChainNode,
        again: Callable[[], list[Effect]] = list,
    ) -> None:
        """Under the lock; Elsewhere if it loses its place. `again` is done every second."""
        deadline_s = clock.monotonic() + COMMIT_S
        again_s = clock.monotonic() + _AGAIN_S
        while not is_ready():
            self._check_waiting(node, deadline_s)
            self.changed.wait(max(0.0, again_s - clock.monotonic()))
            if clock.monotonic() >= again_s:
                again_s = clock.monotonic() + _AGAIN_S
                effects = again()
                if effects:
                    self.run(effects)

    def _awaited(self) -> str:
        """Which process an operation waits for."""
        if (successor := self.node.successor) is None:
            return "the coordinator"
        return replace(self.place, copy=successor).in_words()

    def _check_waiting(self, node: ChainNode, deadline_s: float) -> None:
        """Elsewhere if this member has lost its place since."""
        if self.is_closed:
            raise ModelFailure("the server was stopped")
        if node is not self.node:
            raise self.elsewhere("was removed from its chain")
        if clock.monotonic() > deadline_s:
            raise ModelFailure(f"{self._awaited()} has not answered for {COMMIT_S:.0f} s")
