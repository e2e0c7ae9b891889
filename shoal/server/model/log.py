"""The log of one model: every decision of the leader, in order.

    leader     decide: ledger -> entry -> followers -> its own state
    follower   replay: entry -> its own state

Entries hold decisions, not gradients. A worker stages a push on every server before it commits
the push to the leader, so a decision finds its data in the push buffers of each server.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shoal.server import messages
from shoal.server.consistency import ImpossiblePush
from shoal.server.model.membership import Membership
from shoal.server.model.shard import DTYPES, clip_factor
from shoal.server.model.state import ModelState, OpenStep, WaitingPush
from shoal.server.protocol import Refused

MAX_ENTRIES = 4096  # that are kept for followers
MAX_EARLY_STEPS = 1024  # that a push may be ahead of the servers, after the loss of one


class NoFollowers:
    """The leader of a model with one server: no follower gets its log, or has norms."""

    def wait_connected(self) -> None: ...
    def publish(self, entry: messages.LogEntry) -> None: ...
    def request_norms(self, divisor: float) -> None: ...
    def close(self) -> None: ...

    def receive_norms(self) -> list[float]:
        return []


class Log:
    """Entries with positions from 1 on, and their effect on the state."""

    def __init__(self, state: ModelState, membership: Membership, defers_norms: bool = False):
        """`defers_norms`: a step that needs norms of other servers is closed later."""
        self.position = 0  # of the latest entry
        self.shared: int | None = None  # the latest one for other servers; None: all are
        self.may_lose = False  # what was acknowledged: eventual consistency
        self._defers_norms = defers_norms
        self.followers = NoFollowers()
        self.on_save: Callable[[int], None] = lambda number: None
        self._state = state
        self._membership = membership
        self._lock = membership.lock
        self._norms: Sequence[float] | None = None  # while the norm of all shards is awaited
        self._total: float | None = None  # that norm
        self._entries: deque[messages.LogEntry] = deque(maxlen=MAX_ENTRIES)

    def decide(self, worker: int, sequence: int, commit: messages.Commit) -> messages.Ack:
        """A push is staged on all servers: log the verdict, and the step that it completes."""
        if not self._is_ready_for(commit):
            self._state.waiting.append(WaitingPush(worker, sequence, commit))
            return messages.Ack("staged", self.position)
        ack = self._judge(worker, sequence, commit)
        self._go_on()
        return ack

    def _judge(self, worker: int, sequence: int, commit: messages.Commit) -> messages.Ack:
        try:
            verdict = self._state.ledger.judge(worker, commit.step)
        except ImpossiblePush as error:
            raise Refused(str(error)) from error
        push = messages.PushDecided(
            worker, sequence, commit.step, verdict, commit.batch_fraction, commit.lr, commit.save
        )
        self._append(push)
        position = self.position
        saved = self._complete_step(push)
        ack = self._state.acks[worker] = messages.Ack(verdict, position, saved)
        return ack

    def _is_ready_for(self, commit: messages.Commit) -> bool:
        """Whether a push can be judged; else it waits for a step that others make up.

        A worker that goes on with a step that is not due had got the steps before it from a server
        that is gone. It waits until all workers have said where they are.
        """
        if self._state.open_step is not None:
            return False
        ahead = commit.step - self._state.version
        is_early = self.may_lose and not self._state.spec.rule.applies_each_push and ahead > 0
        return not is_early or ahead > MAX_EARLY_STEPS

    def lose_pushes(self, worker: int, sequence: int, step: int) -> None:
        """Pushes up to `sequence` were acknowledged by a server that is gone, and are not here."""
        self._append(messages.PushesLost(worker, sequence, step))
        self._state.acks[worker] = messages.Ack("again", self.position)
        self._go_on()

    def _go_on(self) -> None:
        """Steps that wait for lost pushes only, and pushes that can be judged now."""
        state = self._state
        while True:
            while state.open_step is None and state.ledger.complete():
                self._complete_step(state.counted[-1] if state.counted else None)
            ready = (push for push in state.waiting if self._is_ready_for(push.commit))
            if (push := next(ready, None)) is None:
                return
            state.waiting.remove(push)
            self._judge(*push)

    def close_step(self, step: messages.StepApplied) -> None:
        """The norms of all servers are known; pushes that have come meanwhile are judged."""
        if self._state.open_step is None or step.version != self._state.version + 1:
            return
        self._state.open_step = None
        self._append(step)
        self._go_on()

    def open_step(self) -> messages.StepApplied | None:
        """At the leader: the step that is to be closed, once all servers have said their norms."""
        open_step = self._state.open_step
        if open_step is None:
            return None
        step = self._step(*open_step)
        return step if self._state.open_step is open_step else None

    def depart(self, worker: int) -> None:
        """A worker has left or was lost; the surviving ones may make up a step now."""
        self._append(messages.WorkerLeft(worker))
        if self._state.counted and not self._state.spec.rule.is_synchronous:
            self._complete_step(self._state.counted[-1])
        self._go_on()

    def rejoin(self, worker: int, incarnation: int) -> int:
        """A worker that was lost is back; returns the step that it goes on with."""
        ledger = self._state.ledger
        step = max(ledger.present, ledger.clocks[worker])
        self._append(messages.WorkerJoined(worker, incarnation, step))
        return step

    def _complete_step(self, latest: messages.PushDecided | None) -> int | None:
        """Log an update if the counted pushes make up a step; the number that it is saved under."""
        ledger = self._state.ledger
        if not ledger.complete() or self._state.open_step is not None:
            return None
        if latest is None:
            self._append(messages.StepApplied(ledger.version + 1, None, 1.0, None))
            return None
        divisor = self._divisor()
        if self._defers_norms and self._needs_norms():
            self._state.open_step = OpenStep(divisor, latest)
            return self._state.next_save
        step = self._step(divisor, latest)
        self._append(step)
        return step.save

    def _step(self, divisor: float, latest: messages.PushDecided) -> messages.StepApplied:
        version = self._state.version + 1
        factor = self._clip_factor(divisor, latest.batch_fraction)  # may release the lock
        return messages.StepApplied(version, latest.lr, divisor, factor, self._state.next_save)

    def _divisor(self) -> float:
        """Where not every worker counts, the mean is over the samples of those that do."""
        ledger = self._state.ledger
        if ledger.rule.applies_each_push:
            return 1.0
        is_whole = ledger.rule.quorum is None and len(self._state.counted) == ledger.rule.workers
        return 1.0 if is_whole else self._state.fraction

    def _needs_norms(self) -> bool:
        """Whether a step is clipped by more than the gradients that are here."""
        spec = self._state.spec
        is_clipped = spec.clip_norm is not None and spec.optimizer is not None
        return is_clipped and (spec.servers > 1 or spec.norm_from_workers)

    def _clip_factor(self, divisor: float, batch_fraction: float) -> float | None:
        spec = self._state.spec
        bound = spec.clip_norm
        if bound is None or spec.optimizer is None:
            return None
        if spec.rule.applies_each_push:
            bound *= batch_fraction  # the push is a fraction of a step, and so is its norm
        self.followers.request_norms(divisor)
        own = self._state.norms(divisor)
        norms = [*own, *self.followers.receive_norms()]
        if spec.norm_from_workers:
            norms = [self._await_total(norms)]
        return clip_factor(norms, bound, DTYPES[spec.dtype])

    def norms(self, worker: int) -> Sequence[float]:
        """The norm of every parameter slice of all servers, once the step is summed."""
        if not self._state.spec.norm_from_workers or self._state.spec.clip_norm is None:
            raise Refused("the servers of this model do not clip by a norm of the workers")
        with self._lock:
            self._membership.wait(worker, lambda: self._norms is not None)
            assert self._norms is not None
            return self._norms

    @property
    def awaits_total(self) -> bool:
        return self._norms is not None and self._total is None

    def set_total(self, value: float, push: tuple[int, int] = (0, 0)) -> None:
        """The norm over all shards has arrived, from a worker after its push with this number."""
        worker, sequence = push
        with self._lock:
            if not self.awaits_total:
                if 0 < sequence <= self._state.decided.get(worker, 0):
                    return  # its answer was lost, and it is sent again
                raise Refused("TOTAL_NORM arrives, but no step waits for it")
            self._total = value
            self._lock.notify_all()

    def _await_total(self, norms: Sequence[float]) -> float:
        self._norms = norms
        self._lock.notify_all()
        self._lock.wait_for(lambda: self._membership.failure is not None or self._total is not None)
        self._membership.check()
        total = self._total
        assert total is not None
        self._norms = self._total = None
        return total

    def _append(self, decision: messages.Decision) -> None:
        entry = messages.LogEntry(self.position + 1, decision)
        self.followers.publish(entry)
        self._apply(entry)

    def replay(self, entry: messages.LogEntry) -> None:
        """Apply an entry of the leader."""
        if entry.position != self.position + 1:
            raise Refused(f"entry {entry.position} is out of order: expected {self.position + 1}")
        self._apply(entry)

    def entries_after(self, position: int, shared: bool = False) -> list[messages.LogEntry]:
        """What a follower lacks; `shared`: what the loss of this server does not undo."""
        oldest = self.position - len(self._entries) + 1
        if not oldest <= position + 1 <= self.position + 1:
            raise Refused(
                f"entry {position + 1} is not in the log, which has entries {oldest} to "
                f"{self.position}"
            )
        end = self.shared if shared and self.shared is not None else self.position
        return list(itertools.islice(self._entries, position + 1 - oldest, end + 1 - oldest))

    def restart(self, position: int, entries: Iterable[messages.LogEntry] = ()) -> None:
        """The state was replaced: entries up to `position`, but for these, do not lead to it."""
        self.position = position
        self.shared = None if self.shared is None else position
        self._entries.clear()
        self._entries += entries

    def latest_entries(self, count: int) -> list[messages.LogEntry]:
        return list(self._entries)[-count:]

    def _apply(self, entry: messages.LogEntry) -> None:
        decision = entry.decision
        self._state.apply(decision)
        self.position = entry.position
        self._entries.append(entry)
        if isinstance(decision, messages.StepApplied) and decision.save is not None:
            self.on_save(decision.save)
