"""One model on one server.

The leader (server 0) decides about pushes and writes each decision to a log. Every server applies
the same entries in the same order, so one decision holds for all of them. This also holds where
servers hold shards of a split replica, each a model of its own (`ReplicaSplit`).

    worker ── COMMIT ──> server 1, 2 …  staged
    worker ── COMMIT ──> leader ── ledger ──> entries ──> server 1, 2 …
                                     └─> its own state      └─> their state

    membership   workers that join, leave or are lost; barriers
    state        weights, optimizer, ledger, the pushes of the open step
    log          decisions with positions; norms over servers and shards
    tables       rows of embedding tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.runtime import clock
from shoal.runtime.wording import counted
from shoal.server.embedding.hashing import Ids
from shoal.server.messages import (
    Ack,
    Commit,
    LogEntry,
    ModelSpec,
    Pull,
    Pulled,
    RowBatch,
    RowsPulled,
    ShardState,
    WorkerJoined,
)
from shoal.server.model.compression import PushCompression
from shoal.server.model.log import Log
from shoal.server.model.membership import Member, Membership, ModelFailure
from shoal.server.model.shard import RowPush
from shoal.server.model.shard_state import get_state
from shoal.server.model.state import ModelState
from shoal.server.model.tables import Tables
from shoal.server.protocol import Refused
from shoal.server.rows.memory import RowTarget
from shoal.server.shared_memory import attach_weights, file_of


class ServedModel:
    """All parts share one lock, a condition. The thread that completes a step applies it."""

    def __init__(
        self,
        spec: ModelSpec,
        is_leader: bool,
        in_chain: bool = False,
        device: torch.device | None = None,
    ):
        """`in_chain`: the memory of workers is read, and not used or written."""
        self.spec = spec
        self.in_chain = in_chain
        self.is_leader = is_leader
        self.compression = None if spec.compress is None else PushCompression(spec)
        self.lock = clock.Condition()
        self.membership = Membership(self.lock, spec.rule)
        self.tables = Tables(self.lock, spec)
        self.state = ModelState(spec, self.tables, device)
        # the leader applies each push when it decides about it, from where its gradients are
        is_here = is_leader and self.state.shard.device.type == "cpu"
        is_updated = spec.optimizer is not None and spec.optimizer.is_elementwise
        is_step = spec.rule.applies_each_push and spec.clip_norm is None
        self.state.uses_pushes = is_here and is_updated and is_step
        self.log = Log(self.state, self.membership, in_chain)
        if is_leader:
            self.membership.on_departure = self._log_departure
        self._weights_file: tuple[int, int] | None = None  # the memory that workers map

    @property
    def version(self) -> int:
        return self.state.version

    def fail(self, reason: str, is_loss: bool = False) -> None:
        self.membership.fail(ModelFailure(reason, is_loss=is_loss))

    # ------------------------------------------------------------------ workers

    def join(self, worker: int, incarnation: int) -> Member:
        pushes = self.state.shard.new_pushes(self.in_chain)
        member = Member(worker, incarnation, pushes)
        with self.lock:
            self.membership.join(member)
            into = self.state.arriving if member.comes_back else self.state.pushes
            into[worker] = pushes
        return member

    def attach(self, worker: int, out: Tensor, inbox: Tensor) -> None:
        """Read the pushes of a worker from memory that it shares, and write there what it pulls."""
        with self.lock:
            member = self.membership.members[worker]
            if self.in_chain:
                member.out = out if self.compression is None else None
                return
            member.inbox = inbox
            if self.compression is None:
                member.pushes.gradients = out

    def share_weights(self, worker: int, descriptor: int) -> None:
        """Keep the weights in memory that this worker maps: the same for all workers."""
        spec = self.spec
        file = file_of(descriptor)
        if self.state.shard.device.type != "cpu":
            raise Refused("weights on a GPU are not shared with workers")
        if not spec.rule.is_synchronous or spec.optimizer is None or self.in_chain:
            raise Refused(f"{spec.rule} does not share its weights with workers")
        with self.lock:
            if self._weights_file is None:
                memory = attach_weights(descriptor, self.state.shard.dtype, spec.size)
                self.state.shard.move_to(memory[spec.start : spec.stop])
                self._weights_file = file
            elif self._weights_file != file:
                raise Refused("the workers of one model share different memories")
            self.membership.members[worker].sees_weights = True

    def _log_departure(self, worker: int) -> None:
        if self.membership.failure is not None:
            return
        try:
            self.log.depart(worker)
        except ModelFailure as failure:
            self.membership.fail(failure)
        if self.state.counted:
            self._check_reachable()

    def _check_reachable(self) -> None:
        """Where every worker has to push, there is no next update without those that have left."""
        pushed = {push.worker for push in self.state.counted}
        for worker in sorted(self.membership.departed - pushed):
            if self.is_leader and self.spec.rule.is_synchronous:
                steps = self.state.ledger.clocks[worker]
                reason = (
                    f"worker {worker} has ended its training after {counted(steps, 'step')}, and "
                    "others go on: under ps all workers have to take equally many"
                )
                self.membership.fail(ModelFailure(reason))

    @property
    def will_have_weights(self) -> bool:
        """Whether the first weights are here, or a live worker gives them."""
        state = self.state
        membership = self.membership
        is_asked = state.weights_from is not None and state.weights_from not in membership.departed
        return state.has_weights or is_asked or bool(membership.are_from_start)

    def wait_for_weights(self, member: Member) -> None:
        """Before a worker that came back trains, the first weights have to be here."""

        def may_enter() -> bool:
            return self.state.has_weights or not self.will_have_weights

        with self.lock:
            if member.comes_back:
                self.membership.wait(member.worker, may_enter)

    # ------------------------------------------------------------------ pushes

    def commit(
        self, member: Member, sequence: int, commit: Commit, rows: Sequence[RowPush] | None = None
    ) -> Ack:
        """A push is complete here. The leader decides about it; followers keep it until then."""
        worker = member.worker
        with self.lock:
            if not self.in_chain:
                self.membership.check()
            if self.is_leader:
                self.log.followers.wait_connected()
            if self.membership.members[worker] is not member:
                raise Refused(f"worker {worker} was started again: its former process is refused")
            pushes = member.pushes
            if pushes.is_repeated(sequence):
                return Ack("again", self.log.position)
            pushes.commit(sequence, pushes.take_rows() if rows is None else rows)
            ack = Ack("staged", self.log.position)
            if self.is_leader:
                self.state.missed_updates[max(0, self.version - commit.version)] += 1
                ack = self.log.decide(worker, sequence, commit)
            self.lock.notify_all()
            return ack

    def note_repeat(self) -> None:
        """A push has come again to the server that answers it; other copies do not count it."""
        with self.lock:
            self.state.repeated_pushes += 1

    def verdict(self, worker: int, sequence: int) -> Ack:
        """The answer to a push; the leader's may have to wait for the norms of a step."""
        with self.lock:
            if self.is_leader:
                self.membership.wait(worker, lambda: self.state.decided.get(worker, 0) >= sequence)
            known = self.state.acks.get(worker) if self.is_leader else None
            return known or Ack("again", self.log.position)

    def check_push(self, member: Member, sequence: int, commit: Commit) -> None:
        """Refuse a push that is not the next one, or not whole: what lacks is of an earlier one."""
        pushes = member.pushes
        pushes.expect(sequence)
        if pushes.received_bytes != commit.pushed_bytes:
            raise Refused(
                f"worker {member.worker} has sent {commit.pushed_bytes} bytes for step "
                f"{commit.step}, and {pushes.received_bytes} have arrived"
            )
        if self.compression is not None or not member.shares_memory:
            self.state.shard.check_received(pushes)

    def wait_closed(self, worker: int) -> None:
        """Wait until every push so far has its update: a step may be open for norms of servers.

        Behind a barrier all workers see the same weights. A norm of workers comes before it.
        """
        with self.lock:
            if not self.spec.norm_from_workers:
                self.membership.wait(worker, lambda: self.state.open_step is None)

    def close_with(self, worker: int, norm: float) -> None:
        """The norm over all shards has arrived; returns when the step is closed with it."""
        with self.lock:
            version = self.version
            if self.state.open_step is None:
                return  # the answer was lost: it is closed already

            def is_closed() -> bool:
                return self.version > version

            self.membership.wait(worker, lambda: is_closed() or self.log.awaits_total)
            if not is_closed():
                self.log.set_total(norm)
            self.membership.wait(worker, is_closed)

    def settle(self, worker: int, position: int, sequence: int) -> None:
        """Wait until the log has been applied up to `position`.

        Positions may be of a leader that is gone: where servers have copies, until the push
        is decided here.
        """

        def is_settled() -> bool:
            if self.in_chain:
                return self.state.decided.get(worker, 0) >= sequence
            return self.log.position >= position

        with self.lock:
            self.membership.wait(worker, is_settled)
            self.state.shard.synchronize()  # the worker may overwrite what a GPU has read

    def replay(self, entry: LogEntry) -> None:
        """Apply a decision of the leader."""
        with self.lock:
            self.log.replay(entry)
            if isinstance(entry.decision, WorkerJoined):
                self.membership.enter(entry.decision.worker)
            self.lock.notify_all()

    # ------------------------------------------------------------------ weights

    def pull(self, worker: int, request: Pull) -> tuple[Pulled, Tensor, Tensor | None]:
        """Weights (or the summed gradient), once the rule allows; the last one is to be sent.

        The copy is of one version. It is made under the lock, except where the rule is
        synchronous: there the next update needs a push that this worker makes after the answer.
        """
        source = self.state.shard.pulled
        with self.lock:
            if not self._is_ready(request):
                self._check_reachable()
            self.membership.wait(worker, lambda: self._is_ready(request), self._behind)
            member = self.membership.members[worker]
            pulled = Pulled(self.version, None, None)
            if self.is_leader:
                ledger = self.state.ledger
                if request.step is not None:
                    self.state.steps_ahead[max(0, request.step - ledger.slowest)] += 1
                pulled = Pulled(self.version, ledger.slowest, ledger.fastest)
            loss_flags = self.state.shard.loss_flags.clone()
            if not self.spec.rule.is_synchronous:
                return pulled, loss_flags, member.fill(source)
        if member.sees_weights:
            return pulled, loss_flags, None
        if member.inbox is None and source.device.type == "cpu":
            return pulled, loss_flags, source
        return pulled, loss_flags, member.fill(source)

    def pull_rows(self, worker: int, request: RowBatch, ids: Ids, target: RowTarget) -> RowsPulled:
        """Rows; a copy of a server has them as new as the weights that the worker has got."""
        with self.lock:
            if self.in_chain and not self.spec.rule.applies_each_push:
                self.membership.wait(worker, lambda: self.version >= request.version)
            return self.tables.pull(request.table, ids, target, request.copies, request.version)

    def _behind(self) -> list[int]:
        """The workers that the leader waits for: the slowest ones."""
        if not self.is_leader:
            return []
        ledger = self.state.ledger
        live = ledger.live - self.membership.departed
        return sorted(w for w in live if ledger.clocks[w] == ledger.slowest)

    def _is_ready(self, request: Pull) -> bool:
        if self.version < request.version:
            return False
        is_ruled = self.is_leader and request.step is not None
        return not is_ruled or self.state.ledger.may_start(request.step or 0)

    # ------------------------------------------------------------------ checkpoints

    def optimizer_state(self) -> tuple[ShardState, list[Tensor]]:
        with self.lock:
            self.membership.check()
            state, tensors = get_state(self.state.shard, self.version)
            return state, [tensor.clone() for tensor in tensors]

    def report(self, with_tables: bool = True) -> dict[str, Any]:
        with self.lock:
            state = self.state
            membership = self.membership
            ledger = self.state.ledger
            counts: dict[str, Any] = {
                "updates": ledger.updates,
                "sent_again": state.repeated_pushes,
                "lost": membership.lost,
                "came_back": _by_number(state.returns),
                "is_complete": state.is_from_start,
                "lost_pushes": state.lost_pushes,
            }
            if self.is_leader:
                workers = range(ledger.rule.workers)
                left = {w: ledger.skipped(w, to_the_end=membership.has_left(w)) for w in workers}
                counts |= {
                    "workers": {str(w): dict(ledger.outcomes[w]) for w in workers},
                    "left_out": _by_number(left),
                    "missed_updates": _by_number(state.missed_updates),
                    "steps_ahead": _by_number(state.steps_ahead),
                }
            return counts | self.tables.report() if with_tables else counts


def _by_number(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}
