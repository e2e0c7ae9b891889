"""One model on one server: its workers, its shard, and the log of what was decided.

The lead (server 0) keeps the ledger and writes a log: this push counts, that one does not, now
update. Every server carries out the same entries in the same order, so one decision holds for
all of them, also where they hold parts of a split replica, each a model of its own (`PartOf`).
A worker commits a push to the lead last, when the others have it.

    worker ── COMMIT ──> server 1, 2 …  staged
    worker ── COMMIT ──> lead ── ledger ──> entries ──> server 1, 2 …
                                   └─> its own shard      └─> their shards
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.embedding.table import RowTable, sum_duplicates
from shoal.server.consistency import Impossible, Ledger, Verdict
from shoal.server.model.compression import Packing
from shoal.server.model.shard import Shard, clip_factor
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import Ack, Commit, Entry, Pull, Pulled, Spec, State
from shoal.server.shared_memory import Segment, attach_weights

LOG_ENTRIES = 4096
MOST_TABLES = 256
_LOOK_S = 0.1  # how often to ask for workers that have not joined yet
# hands out an entry to the other servers / collects everybody's norms and gives the factor
Agree = Callable[[Sequence[float], float], float]


class Lost(Exception):
    """A worker without which the run cannot go on has died, or another server has."""

    def __init__(self, sentence: str, worker: int | None):
        self.sentence = sentence
        self.worker = worker
        super().__init__(sentence)


class RowPush(NamedTuple):
    """Gradients of rows of one table, from one worker; perhaps of none of them."""

    table: str
    ids: Tensor
    grads: Tensor
    lr: float


class Occupant(NamedTuple):
    """Who serves one connection of a worker, and how to make it stop."""

    thread: int
    cut: Callable[[], None]
    number: int  # of connections, in the order in which they were made


@dataclass
class Member:
    """One worker, as a server sees it."""

    worker: int
    incarnation: int
    staged: Tensor  # parts x elements of the slice
    heads: Tensor  # parts x (loss, a flag a parameter)
    inbox: Tensor | None  # in shared memory; None: weights go over the wire
    outbox: Tensor | None = None
    sees_weights: bool = False  # they lie in memory of all workers: nothing has to be copied
    watermark: int = 0  # the sequence of the latest push that was taken
    consumed: int = 0  # ... and whose memory the worker may use again
    commit: Commit | None = None
    verdict: str = "staged"
    left: bool = False
    met: int = 0
    lanes: dict[str, Occupant] = field(default_factory=dict)
    rows: list[RowPush] = field(default_factory=list)  # of the push that is being staged
    unpacked: int = 0  # the sequence of the push whose compressed gradients are in `staged`
    kept: bytearray | None = None  # what it carries from step to step, when it was last saved

    def take_copy(self, source: Tensor) -> Tensor | None:
        """Into the memory that it shares; or into some of its own, which is then to be sent."""
        if self.inbox is not None:
            self.inbox.copy_(source)
            return None
        if self.outbox is None:
            self.outbox = torch.empty_like(source)
        return self.outbox.copy_(source)


class Holding:
    """All state is behind one lock; whoever completes a step carries out the update."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.shard = Shard(spec)
        self.packing = None if spec.compress is None else Packing(spec)
        self.changed = threading.Condition()
        self.members: dict[int, Member] = {}
        self.version = self.position = 0
        self.log: deque[Entry] = deque(maxlen=LOG_ENTRIES)
        self.ledger = Ledger(spec.rule) if spec.index == 0 else None
        self.agree: Agree = self.factor
        self.tell: Callable[[Entry], None] = lambda entry: None  # the other servers
        self.failure: Lost | None = None
        self.gone: set[int] = set()
        self.displaced: set[int] = set()  # threads that serve connections which were made anew
        self.is_gone: Callable[[int], bool] | None = None  # of workers that have not joined
        self._first_at: dict[int, int] = {}  # meeting -> the first of the workers that came
        self.again = 0
        self.missed: Counter[int] = Counter()  # updates between a pull and its push
        self.ahead: Counter[int] = Counter()  # steps ahead of the slowest at a pull
        self.tables: dict[str, RowTable] = {}
        self._shared: tuple[int, int] | None = None  # the file of the memory of all workers
        self._rows: list[tuple[int, RowPush]] = []  # by worker, for the update to come
        self._counting: list[Member] = []
        self._share = 0.0
        self._norms: Sequence[float] | None = None  # while the norm of the whole is awaited
        self._norm_of_whole: float | None = None

    # ------------------------------------------------------------------ workers

    def join(self, worker: int, incarnation: int, segment: Segment | None) -> Member:
        spec = self.spec
        shard = self.shard
        with self.changed:
            if worker >= spec.rule.workers or worker in self.members:
                raise Refused(f"worker {worker} of {spec.rule.workers} is not expected here")
            heads = torch.zeros(shard.parts, shard.head_size, dtype=shard.head_dtype)
            run = slice(spec.start, spec.stop)
            inbox = None if segment is None else segment.inbox[run]
            if segment is None or self.packing is not None:
                staged = torch.zeros(shard.parts, shard.size, dtype=shard.dtype)
            else:
                staged = segment.out[:, run]
            member = Member(worker, incarnation, staged, heads, inbox)
            self.members[worker] = member
            self.changed.notify_all()
            return member

    def share(self, worker: int, handle: int) -> None:
        """This worker sees the weights where they are. All that do have to mean the same memory."""
        spec = self.spec
        found = os.fstat(handle)
        if not spec.rule.needs_everyone or spec.optimizer is None:
            raise Refused(f"{spec.rule} does not share its weights with workers")
        with self.changed:
            if self._shared is None:
                memory = attach_weights(handle, self.shard.dtype, spec.size)
                self.shard.move_to(memory[spec.start : spec.stop])
                self._shared = (found.st_dev, found.st_ino)
            elif self._shared != (found.st_dev, found.st_ino):
                raise Refused("the workers of one model share different memories")
            self.members[worker].sees_weights = True

    def leave(self, worker: int) -> None:
        """A worker has done all its steps."""
        with self.changed:
            self.members[worker].left = True
            self._lose(worker)

    def lose(self, worker: int) -> None:
        """Its connection has broken. Where everybody is needed, that ends the run for all."""
        with self.changed:
            member = self.members.get(worker)
            if member is None or worker in self.gone:
                return
            if self.spec.rule.needs_everyone:
                self._fail(Lost(f"worker {worker} has died", worker))
            self._lose(worker)

    def miss_absent(self) -> None:
        """Do not wait for workers that have ended before they joined."""
        with self.changed:
            absent = set(range(self.spec.rule.workers)) - self.members.keys() - self.gone
            for worker in absent if self.is_gone is not None else ():
                if self.is_gone is not None and self.is_gone(worker):
                    if self.spec.rule.needs_everyone:
                        self._fail(Lost(f"worker {worker} has ended before it joined", worker))
                    self._lose(worker)

    def fail(self, sentence: str) -> None:
        with self.changed:
            self._fail(Lost(sentence, None))

    @property
    def is_over(self) -> bool:
        return len(self.gone) == self.spec.rule.workers

    def meet(self, worker: int, number: int) -> int:
        """Wait until every live worker has called it as often; all are told the first of them."""
        with self.changed:
            self.members[worker].met = number
            self.changed.notify_all()
            self._wait(worker, lambda: self._have_met(number))
            self._check()
            self._first_at.pop(number - 2, None)
            live = set(range(self.spec.rule.workers)) - self.gone
            return self._first_at.setdefault(number, min(live, default=worker))

    @property
    def first(self) -> int:
        """The first worker that has not died."""
        died = {w for w in self.gone if w not in self.members or not self.members[w].left}
        return min(set(range(self.spec.rule.workers)) - died, default=0)

    def wait_over(self) -> None:
        with self.changed:
            while not self.changed.wait_for(
                lambda: self.is_over or self.failure is not None or self._is_displaced(),
                self._patience_s(),
            ):
                self.miss_absent()

    # ------------------------------------------------------------------ pushes

    def commit(self, worker: int, sequence: int, commit: Commit) -> Ack:
        """A push is whole here. The lead decides about it; the others keep it until then."""
        with self.changed:
            self._check()
            member = self.members[worker]
            if sequence <= member.watermark:
                self.again += 1
                return Ack("again", self.position)
            self.expect(member, sequence)
            if self.packing is not None and self.shard.size and member.unpacked != sequence:
                raise Refused(f"push {sequence} is committed without its gradients")
            member.commit = commit
            member.watermark = sequence
            if self.ledger is None:
                self.changed.notify_all()
                return Ack("staged", self.position)
            try:
                verdict = self.ledger.arrive(worker, commit.step)
            except Impossible as error:
                raise Refused(str(error)) from error
            self.missed[max(0, self.version - commit.version)] += 1
            counts = verdict is not Verdict.DROPPED
            self._decide("admit" if counts else "drop", worker, sequence, commit)
            position = self.position
            self._complete(commit)
            self.changed.notify_all()
            return Ack(verdict.value, position)

    def expect(self, member: Member, sequence: int) -> None:
        """Refuse a push that leaves one out, or that overwrites one still needed."""
        if sequence != member.watermark + 1:
            raise Refused(f"push {sequence} after {member.watermark}")
        if member.consumed != member.watermark:
            raise Refused(f"push {sequence} before {member.watermark} is done with")

    def settle(self, worker: int, position: int) -> None:
        """Wait until the log has been carried out up to `position`."""
        with self.changed:
            self._wait(worker, lambda: self.position >= position)

    def replay(self, entry: Entry) -> None:
        """Carry out a decision of the lead."""
        with self.changed:
            if entry.position != self.position + 1:
                raise Refused(f"entry {entry.position} of the log after {self.position}")
            self._carry_out(entry)
            self.changed.notify_all()

    # ------------------------------------------------------------------ clipping

    def factor(self, norms: Sequence[float], bound: float) -> float:
        """What to multiply gradients by, from the norms of all servers; under the lock."""
        if self.spec.is_part:
            norms = [self._await_whole(norms)]
        return clip_factor(norms, bound, self.shard.dtype)

    def norms(self, worker: int) -> Sequence[float]:
        """Of every cutting of every server, once the pushes of a step are added up."""
        if not self.spec.is_part or self.spec.clip_norm is None:
            raise Refused("this server clips by itself, or not at all")
        with self.changed:
            self._wait(worker, lambda: self._norms is not None)
            assert self._norms is not None
            return self._norms

    def set_norm(self, value: float) -> None:
        with self.changed:
            if self._norms is None or self._norm_of_whole is not None:
                raise Refused("a norm that nobody has asked for")
            self._norm_of_whole = value
            self.changed.notify_all()

    def _await_whole(self, norms: Sequence[float]) -> float:
        self._norms = norms
        self.changed.notify_all()
        self.changed.wait_for(lambda: self.failure is not None or self._norm_of_whole is not None)
        self._check()
        found = self._norm_of_whole
        self._norms = None
        self._norm_of_whole = None
        assert found is not None
        return found

    # ------------------------------------------------------------------ rows of tables

    def make_table(self, spec: TableSpec) -> None:
        """Hold this server's rows of a table; harmless when they are held already."""
        with self.changed:
            held = self.tables.get(spec.name)
            if held is None:
                if len(self.tables) >= MOST_TABLES:
                    raise Refused(f"a model of more than {MOST_TABLES} tables")
                self.tables[spec.name] = RowTable(spec, self.spec.index, self.spec.servers)
            elif replace(held.spec, optimizer=spec.optimizer) != spec:
                raise Refused(f"there is another {spec} already, of other rows")
            elif held.optimizer != spec.optimizer:
                held.set_optimizer(spec.optimizer)

    def table(self, name: str) -> RowTable:
        if name not in self.tables:
            raise Refused(f"there is no table {name!r} here")
        return self.tables[name]

    def pull_rows(self, name: str, ids: Tensor) -> Tensor:
        with self.changed:
            return self.table(name).pull(ids)

    def stage_rows(self, worker: int, sequence: int, push: RowPush) -> None:
        """Part of a push; it counts if and when the push does."""
        with self.changed:
            member = self.members[worker]
            table = self.table(push.table)
            if sequence <= member.watermark:
                return
            self.expect(member, sequence)
            if len(member.rows) >= MOST_TABLES:
                raise Refused("a push with too many tables")
            table.check(push.ids, push.grads)
            member.rows.append(push)

    # ------------------------------------------------------------------ weights

    def pull(self, worker: int, request: Pull) -> tuple[Pulled, Tensor, Tensor | None]:
        """Weights (or the summed gradient), once the rule allows; what of it has to be sent.

        The copy is of one version: made under the lock, or where everybody is waited for, since
        there the next update needs a push that this worker makes only after the answer.
        """
        source = self.shard.data if self.spec.optimizer is not None else self.shard.sum
        with self.changed:
            self._wait(worker, lambda: self._may_take(request))
            member = self.members[worker]
            pulled = self._note_pull(request)
            head = self.shard.head.clone()
            if not self.spec.rule.needs_everyone:
                return pulled, head, member.take_copy(source)
        if member.sees_weights:
            return pulled, head, None
        if member.inbox is None:
            return pulled, head, source
        return pulled, head, member.take_copy(source)

    def state(self) -> tuple[State, list[Tensor]]:
        with self.changed:
            self._check()
            found, tensors = self.shard.state(self.version)
            return found, [tensor.clone() for tensor in tensors]

    def restore(self, state: State, payload: bytearray) -> None:
        """Weights and optimizer state of a checkpoint; everybody goes on from its step."""
        with self.changed:
            self.shard.restore(state, payload)
            self.version = state.steps
            if self.ledger is not None:
                self.ledger.restart(state.steps)
            self.changed.notify_all()

    def report(self) -> dict[str, Any]:
        with self.changed:
            found: dict[str, Any] = {
                "updates": self.version,
                "sent_again": self.again,
                "lost": sorted(
                    w for w in self.gone if w not in self.members or not self.members[w].left
                ),
            }
            if self.ledger is not None:
                outcomes = self.ledger.outcomes
                found["workers"] = {
                    str(w): {v.value: outcomes[w][v] for v in Verdict} for w in sorted(outcomes)
                }
                found["left_out"] = {
                    str(w): self.ledger.left_out(w, w in self.members and self.members[w].left)
                    for w in sorted(outcomes)
                }
                found["missed_updates"] = _by_number(self.missed)
                found["steps_ahead"] = _by_number(self.ahead)
            return found

    # ------------------------------------------------------------------ under the lock

    def _wait(self, worker: int, ready: Callable[[], bool]) -> None:
        def done() -> bool:
            stop = self.failure is not None or worker in self.gone
            return stop or self._is_displaced() or ready()

        while not self.changed.wait_for(done, self._patience_s()):
            self.miss_absent()
        if self._is_displaced():
            raise Lost(f"worker {worker} has connected anew", None)
        if not ready():
            self._check()
            raise Lost(f"worker {worker} has left", None)

    def _is_displaced(self) -> bool:
        return threading.get_ident() in self.displaced

    def _patience_s(self) -> float | None:
        """Nobody wakes us when a worker ends that has never joined."""
        known = self.members.keys() | self.gone
        return None if len(known) == self.spec.rule.workers or self.is_gone is None else _LOOK_S

    def _note_pull(self, request: Pull) -> Pulled:
        slowest = None if self.ledger is None else self.ledger.slowest
        if slowest is not None and request.step is not None:
            self.ahead[max(0, request.step - slowest)] += 1
        fastest = None if self.ledger is None else self.ledger.fastest
        return Pulled(self.version, slowest, fastest)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _may_take(self, request: Pull) -> bool:
        if self.version < request.version:
            return False
        return self.ledger is None or request.step is None or self.ledger.may_start(request.step)

    def _have_met(self, number: int) -> bool:
        workers = set(range(self.spec.rule.workers)) - self.gone
        return all(w in self.members and self.members[w].met >= number for w in workers)

    def _fail(self, failure: Lost) -> None:
        if self.failure is None:
            self.failure = failure
        self.changed.notify_all()

    def _lose(self, worker: int) -> None:
        self.gone.add(worker)
        if self.ledger is not None:
            self.ledger.lose(worker)
            if self._counting and not self.spec.rule.needs_everyone:
                latest = self._counting[-1].commit
                assert latest is not None
                try:
                    self._complete(latest)
                except Lost as lost:
                    self._fail(lost)
        self.changed.notify_all()

    def _complete(self, commit: Commit) -> None:
        """Update, if the pushes that count now make up a step."""
        assert self.ledger is not None
        if not self.ledger.complete():
            return
        rule = self.spec.rule
        bound = self.spec.clip_norm
        divisor = self._share if rule.quorum is not None else 1.0
        if bound is not None and rule.counts_at_once:
            bound *= commit.share  # a push is a share of a step, and so is its length
        self.ledger.apply()
        self._append(
            Entry(
                self.position + 1,
                "apply",
                version=self.ledger.version,
                lr=commit.lr,
                divisor=divisor,
                bound=bound,
            )
        )

    def _decide(self, kind: Any, worker: int, sequence: int, commit: Commit) -> None:
        if kind == "admit":
            self._share += commit.share
        self._append(Entry(self.position + 1, kind, worker, sequence, self.version))

    def _append(self, entry: Entry) -> None:
        self.tell(entry)
        self._carry_out(entry)

    def _carry_out(self, entry: Entry) -> None:
        if entry.kind == "apply":
            self._update(entry)
        else:
            member = self.members[entry.worker]
            if member.watermark < entry.sequence:
                raise Refused(f"the lead counts a push of worker {entry.worker} that is not here")
            if entry.kind == "admit":
                self._take(member)
            else:
                member.consumed = entry.sequence
                member.rows.clear()
        self.position = entry.position
        self.log.append(entry)

    def _take(self, member: Member) -> None:
        if not self.spec.rule.needs_everyone:  # else it is added when all are there, in order
            self.shard.add(member.staged, member.heads, first=not self._counting)
            member.consumed = member.watermark
        self._counting.append(member)
        self._rows += [(member.worker, push) for push in member.rows]
        member.rows.clear()

    def _update(self, entry: Entry) -> None:
        if self.spec.rule.needs_everyone:
            members = sorted(self._counting, key=lambda m: m.worker)
            self.shard.add_all([(m.staged, m.heads) for m in members])
            for member in members:
                member.consumed = member.watermark
        self._counting.clear()
        self._share = 0.0
        self.shard.divide(entry.divisor)
        factor = None
        if entry.bound is not None and self.spec.optimizer is not None:
            factor = self.agree(self.shard.norms(), entry.bound)
        self.shard.update(entry.lr, factor)
        self._update_rows(entry.divisor)
        self.version = entry.version

    def _update_rows(self, divisor: float) -> None:
        """One update of each table that somebody has touched, here or on another server."""
        found = sorted(self._rows, key=lambda item: item[0])
        self._rows = []
        for name in dict.fromkeys(push.table for _, push in found):
            pushes = [push for _, push in found if push.table == name]
            ids = torch.cat([push.ids for push in pushes])
            grads = torch.cat([push.grads for push in pushes])
            if divisor not in (0.0, 1.0):
                grads = grads / divisor
            table = self.tables[name]
            table.push(*sum_duplicates(ids, grads), pushes[-1].lr, table.steps + 1)


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}
