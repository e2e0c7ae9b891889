"""One replica of a shard: the chain node, the state it applies operations to, and who waits.

    handler ── execute ──> node.propose ──> successor … tail ──> Acked ──> apply ──> answer
    handler ── read ─────> what was logged when it arrived is applied; the lease counts

All effects of the node are carried out under one lock, in which operations are applied, too. So
no thread that holds the lock of a model may wait for this one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.runtime.failpoints import failpoint
from shoal.runtime.waits import waiting
from shoal.server.chain.manager import ChainManager
from shoal.server.chain.messages import (
    Append,
    Apply,
    ChainMessage,
    ChangeConfig,
    Disconnect,
    Effect,
    Refetch,
    Reset,
    Send,
    SendSnapshot,
    Teach,
)
from shoal.server.chain.node import ChainNode
from shoal.server.chain.read_lease import ReadLease
from shoal.server.chain.state import ChainConsistency, Fenced, NotHead
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.model_host import ModelHost
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Refused
from shoal.server.replicas.apply import apply
from shoal.server.replicas.elsewhere import Elsewhere
from shoal.server.replicas.images import install_image
from shoal.server.replicas.memory import LentReturned, Mapped, Release
from shoal.server.replicas.operations import EARLY, EMPTY, Lost, Operation, Payload, Pushed
from shoal.server.replicas.payloads import IN_MEMORY, mapped_memories, read_payload
from shoal.server.replicas.peer_link import PeerLink
from shoal.server.replicas.snapshots import Incoming, read_head, read_image, snapshot_sender
from shoal.server.replicas.wire import Proposed, decode_message

COMMIT_S = 120.0  # an operation that is not committed after so long ends the run
ABSENT_S = 10.0  # a worker that has not come to a new head after so long is lost
MAX_KEPT_BYTES = 1 << 30  # of pushes, for a replica that catches up; at least 4 of them
_POLL_S = 0.5
_AGAIN_S = 1.0
_OPERATION_BYTES = 512  # about, without a payload

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaPlace:
    """Which replica of which shard this server is; process = shard * replicas + replica."""

    shard: int
    replica: int
    replicas: int
    consistency: ChainConsistency = "strong"

    @property
    def process(self) -> int:
        return self.shard * self.replicas + self.replica

    def in_words(self) -> str:
        return f"server {self.process} (shard {self.shard}, replica {self.replica})"


@dataclass
class _Outcome:
    answer: Any = None
    error: Exception | None = None


@dataclass
class _Waiter:
    """A thread that has proposed an operation: it is woken alone, and once."""

    node: ChainNode
    position: int
    is_released: bool  # it waits until all others have applied it, too
    outcome: _Outcome | None = None
    woken: threading.Lock = field(default_factory=threading.Lock)  # held until it is woken

    def __post_init__(self) -> None:
        self.woken.acquire()


class ChainRuntime:
    """The chain of one shard, as one of its replicas takes part in it."""

    def __init__(self, place: ReplicaPlace, host: ModelHost, on_reset: Callable[[], None]):
        """`on_reset` ends all connections of workers: this replica has lost its place."""
        self.place = place
        self._in_words = place.in_words()
        self.host = host
        self.changed = threading.Condition()
        self.links: dict[int, PeerLink] = {}
        self.lease = ReadLease()
        self.poke: Callable[[], None] = lambda: None  # the keeper is to look at the coordinator
        self.on_applied: Callable[[], None] = lambda: None
        self.applied = 0
        self._release = Release()
        self._on_reset = on_reset
        self._waiters: dict[int, _Waiter] = {}
        self._losses: dict[tuple[int, int], str] = {}  # (model, worker) -> reason
        self._incoming: dict[int, Incoming] = {}  # snapshots, by sender
        self._is_closed = False
        self._unshared: deque[tuple[int, ServedModel, int]] = deque()  # position, log's position
        self._loss_noted = threading.Event()
        self._absent: dict[tuple[int, int], float] = {}  # (model, worker) -> since when
        self._losing = threading.Thread(target=self._lose_workers, name="shoal-loss", daemon=True)
        self._new_node(time.time_ns())
        host.is_replicated = True
        host.may_lose = place.consistency == "eventual"
        host.execute = self.execute
        host.on_loss = self._note_loss

    def _new_node(self, incarnation: int) -> None:
        place = self.place
        self.node = ChainNode(place.replica, incarnation, place.consistency, place.replicas)
        self.node.weigh = _kept_bytes
        self.node.max_weight = MAX_KEPT_BYTES
        founders = tuple(range(place.replicas))
        self.manager = ChainManager(self.node, founders, self.lease)

    def start(self, links: dict[int, PeerLink]) -> None:
        self.links = links
        for link in links.values():
            link.start()
        self._losing.start()

    def close(self, join_s: float) -> None:
        with self.changed:
            self._is_closed = True
            for position in list(self._waiters):
                self._wake(position)
            self.changed.notify_all()
        self._loss_noted.set()
        for link in self.links.values():
            link.close()
        for link in self.links.values():
            link.join(join_s)

    # ------------------------------------------------------------------ workers ask

    def check_epoch(self, epoch: int) -> None:
        """Elsewhere if a worker's epoch is not the present one, or this is no member."""
        node = self.node
        if not node.is_member:
            raise self.elsewhere("is no member of its chain")
        if epoch != node.epoch:
            raise self.elsewhere(f"is in epoch {node.epoch}, and the request in epoch {epoch}")

    @property
    def is_head(self) -> bool:
        return self.node.is_head

    def check_head(self) -> None:
        if not self.node.is_head:
            raise self.elsewhere("is not the head of its chain")

    def execute(self, operation: Operation, payload: Payload = EMPTY) -> Any:
        """Propose, wait until it is committed and applied here, return the answer."""
        with self.changed:
            waiter = self._propose(Proposed(operation, payload))
        with waiting(self._in_words, self._whom, f"the commitment of {type(operation).__name__}"):
            outcome = self._outcome(waiter)
            if outcome.error is None and not isinstance(operation, EARLY):
                self._await_committed(waiter)
        if outcome.error is not None:
            raise outcome.error
        if self.place.consistency == "eventual":
            self.confirm(waiter.node)
        return outcome.answer

    def _outcome(self, waiter: _Waiter) -> _Outcome:
        """Wait for it without the lock."""
        deadline_s = time.monotonic() + COMMIT_S
        while not waiter.woken.acquire(timeout=1.0):
            self._check_waiting(waiter.node, deadline_s)
        if waiter.outcome is None:
            self._check_waiting(waiter.node, deadline_s)
            raise self.elsewhere("was removed from its chain")
        return waiter.outcome

    def _check_waiting(self, node: ChainNode, deadline_s: float) -> None:
        """Elsewhere if this replica has lost its place since."""
        if self._is_closed:
            raise ModelFailure("the server was stopped")
        if node is not self.node:
            raise self.elsewhere("was removed from its chain")
        if time.monotonic() > deadline_s:
            raise ModelFailure(f"{self._whom()} has not answered for {COMMIT_S:.0f} s")

    def _await_committed(self, waiter: _Waiter) -> None:
        """An eventual head waits for the others with all but pushes."""
        if self.place.consistency == "eventual":
            with self.changed:
                self._await(lambda: waiter.node.committed >= waiter.position, waiter.node)

    def read(self, action: Callable[[], T]) -> T:
        """What a member reads when all that was logged at this moment is applied.

        An eventual one lacks what has not arrived. It is a member still: so it lacks at most
        what a head may be ahead of its tail.
        """
        with self.changed:
            node = self.node
            upto = node.position
            self._await(lambda: self.applied >= upto, node)
        result = action()
        self.confirm(node)
        return result

    def catch_up(self) -> None:
        """Wait until all that is logged now is applied."""
        with self.changed:
            node = self.node
            upto = node.position
            self._await(lambda: self.applied >= upto, node)

    @property
    def acknowledges_at_once(self) -> bool:
        """Before other replicas have a push: so none of them reads it where its worker has it."""
        return self.place.consistency == "eventual"

    def wait_released(self) -> None:
        """Wait until no member reads a push that is applied here from its worker's memory."""
        with self.changed:
            lent = self._release.latest_lent
            self._await(lambda: self._released >= lent, self.node)

    @property
    def _released(self) -> int:
        return self._release.upto(self.applied, self.node.successor)

    def confirm(self, node: ChainNode) -> None:
        """What was read under this node was no old value: by the lease, or by asking all members.

        Elsewhere if it has been replaced: a later life of this replica says nothing about it.
        """
        with self.changed:
            if node is not self.node:
                raise self.elsewhere("was removed from its chain")
            if self.lease.is_valid(node.epoch, time.monotonic()) and node.is_member:
                return
            try:
                number, effects = node.ask()
                self._run(effects)
                again = partial(node.ask_again, number)  # an answer may have been lost
                self._await(lambda: node.is_confirmed(number), node, again)
            except Fenced as error:
                raise self.elsewhere("was removed from its chain") from error

    def _propose(self, proposed: Proposed) -> _Waiter:
        node = self.node
        if self._is_closed:
            raise ModelFailure("the server was stopped")
        try:
            self._await(lambda: node.has_room, node)
            position, effects = node.propose(proposed)
        except (NotHead, Fenced) as error:
            raise self.elsewhere("is not the head of its chain") from error
        waiter = self._waiters[position] = _Waiter(node, position, _is_released(proposed))
        _pass("push.logged", proposed.operation)
        self._run(effects)
        return waiter

    def _await(
        self,
        is_ready: Callable[[], bool],
        node: ChainNode,
        again: Callable[[], list[Effect]] = list,
    ) -> None:
        """Under the lock; Elsewhere if this replica loses its place meanwhile. `again` is what to
        do every second, however often something has changed."""
        deadline_s = time.monotonic() + COMMIT_S
        again_s = time.monotonic() + _AGAIN_S
        while not is_ready():
            self._check_waiting(node, deadline_s)
            self.changed.wait(max(0.0, again_s - time.monotonic()))
            if time.monotonic() >= again_s:
                again_s = time.monotonic() + _AGAIN_S
                effects = again()
                if effects:
                    self._run(effects)

    def _whom(self) -> str:
        successor = self.node.successor
        if successor is None:
            return "the coordinator"
        number = self.place.shard * self.place.replicas + successor
        return f"server {number} (shard {self.place.shard}, replica {successor})"

    def elsewhere(self, reason: str) -> Elsewhere:
        return Elsewhere(self.node.config, f"{self.place.in_words()} {reason}")

    # ------------------------------------------------------------------ replicas speak

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        """A message of another replica; its payload is read without the lock."""
        message, operation = decode_message(meta)
        if operation is None:
            if header.payload_bytes:
                raise Refused(f"{type(message).__name__} has no payload")
            if isinstance(message, Mapped | LentReturned):
                self._hear(sender, message)
            else:
                self._deliver(sender, message)
            return
        assert isinstance(message, Append | Teach)
        _pass("push.received", operation)
        if isinstance(message, Teach) and header.argument == IN_MEMORY:
            raise Refused("Teach has its gradients with it")
        if not self._expects(sender, message):
            connection.skip(header.payload_bytes)
            self._deliver(sender, _without_operation(message))
            return
        _pass("push.deduplicated", operation)
        payload = read_payload(self.host, operation, connection, header)
        _pass("push.validated", operation)
        proposed = Proposed(operation, payload)
        self._deliver(sender, _with_operation(message, proposed))

    def _expects(self, sender: int, message: Append | Teach) -> bool:
        """Whether this message would be appended; what it knows to be committed is applied."""
        with self.changed:
            node = self.node
            if message.epoch != node.epoch or message.position != node.position + 1:
                return False
            if isinstance(message, Teach):
                return not node.is_member and sender == node.config.tail
            if sender != node.predecessor:
                return False
            if message.committed <= node.committed:
                return True
            self._run(node.receive(sender, _committed_alone(message, node.position)))
            return node is self.node

    def _deliver(self, sender: int, message: ChainMessage) -> None:
        with self.changed:
            node = self.node
            if _is_missed(message, node):
                self._run(node.link_up(sender))  # let it be sent again
                return
            effects = node.receive(sender, message)
            _pass_message("push.logged", message)
            self._run(effects)
            _pass_message("push.acknowledged", message)

    def _hear(self, sender: int, message: Mapped | LentReturned) -> None:
        with self.changed:
            if isinstance(message, LentReturned):
                self._release.heard(sender, message.position)
                self._run([])
            elif sender in self.links:
                self.links[sender].mapped = frozenset(message.memories)
                if not message.memories:
                    self._release.forget(sender)

    def announce(self) -> None:
        """Let the other replicas know which memory of workers is mapped here."""
        with self.changed:
            for link in self.links.values():
                link.post(Mapped(mapped_memories(self.host)))

    def link_up(self, peer: int) -> None:
        with self.changed:
            self.links[peer].post(Mapped(mapped_memories(self.host)))
            self._release.tell_again()
            self._run(self.node.link_up(peer))

    def link_lost(self, peer: int) -> None:
        with self.changed:
            self._run(self.node.link_lost(peer))
        self.poke()

    def reconfigure(self, change: Callable[[ChainManager], list[Effect]]) -> None:
        """The keeper has an answer of the coordinator."""
        with self.changed:
            before = self.node.config
            self._release.tell_again()
            self._run(change(self.manager))
            if self.node.config != before:
                is_full = len(self.node.config.members) == self.place.replicas
                self.host.keeps_payloads = self.node.is_tail and not is_full
                self.changed.notify_all()

    # ------------------------------------------------------------------ effects, under the lock

    def _run(self, effects: list[Effect]) -> None:
        """Messages first: others can go on while operations are applied here."""
        if len(effects) > 1 and not any(map(_keeps_order, effects)):
            effects = sorted(effects, key=lambda effect: not isinstance(effect, Send))
        for effect in effects:
            self._carry_out(effect)
        self._note_released()
        self._share_entries()
        self.changed.notify_all()

    def _note_released(self) -> None:
        if not self._release.is_pending:
            return
        upto = self._released
        for position in self._release.take(upto):
            self._wake(position)
        predecessor = self.node.predecessor
        link = None if predecessor is None else self.links.get(predecessor)
        if link is not None and self._release.is_news(upto):
            link.post(LentReturned(upto))

    def _share_entries(self) -> None:
        """Eventual: decisions that all members have are for other shards."""
        while self._unshared and self._unshared[0][0] <= self.node.committed:
            _, model, position = self._unshared.popleft()
            with model.lock:
                model.log.shared = position
                model.lock.notify_all()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            link = self.links.get(effect.to)
            if link is not None:
                if isinstance(effect.message, Teach):
                    effect.message.op.payload.keep()
                link.post(effect.message)
        elif isinstance(effect, Apply):
            for entry in effect.entries:
                self._apply(entry.position, entry.op)
            self.on_applied()
        elif isinstance(effect, Reset):
            self._reset()
        elif isinstance(effect, SendSnapshot):
            self._send_snapshot(effect)
        elif isinstance(effect, Disconnect):
            if effect.to in self.links:
                self.links[effect.to].reconnect()
        else:
            assert isinstance(effect, Refetch | ChangeConfig)
            if isinstance(effect, ChangeConfig):
                failpoint("splice")
            self.manager.look()
            self.poke()

    def _apply(self, position: int, proposed: Proposed) -> None:
        _pass("push.replicated", proposed.operation)
        outcome = _Outcome()
        if self.host.keeps_payloads or self.node.is_teaching:
            proposed.payload.keep()
        try:
            outcome.answer = apply(self.host, proposed.operation, proposed.payload)
        except (Refused, ModelFailure) as error:
            outcome.error = error
        except ShoalError as error:
            outcome.error = Refused(str(error))
        except Exception as error:  # of an optimizer: the same in all replicas
            outcome.error = self._failed(proposed.operation, error)
        self.applied = position
        if _is_released(proposed):
            self._release.note_lent(position)
        self._note_unshared(position, proposed.operation)
        _pass("push.applied", proposed.operation)
        waiter = self._waiters.get(position)
        if waiter is not None:
            waiter.outcome = outcome
            if not waiter.is_released:
                self._wake(position)

    def _wake(self, position: int) -> None:
        waiter = self._waiters.pop(position, None)
        if waiter is not None:
            waiter.woken.release()

    def _note_unshared(self, position: int, operation: Operation) -> None:
        model = self.host.models.get(operation.model)
        if model is not None and model.log.shared not in (None, model.log.position):
            self._unshared.append((position, model, model.log.position))

    def _failed(self, operation: Operation, error: Exception) -> Exception:
        reason = f"{self.place.in_words()} failed: {error!r}"[:4000]
        model = self.host.models.get(getattr(operation, "model", -1))
        if model is not None:
            model.fail(reason)
        return ModelFailure(reason)

    def _reset(self) -> None:
        """It has lost its place: begin again without state, as a learner."""
        incarnation = max(time.time_ns(), self.node.incarnation + 1)
        for position in list(self._waiters):
            self._wake(position)
        self._losses.clear()
        self._unshared.clear()
        self.applied = 0
        self._release = Release()
        self._new_node(incarnation)
        self._on_reset()
        self.host.clear("this server was removed from its chain")
        self.announce()
        self.manager.look()
        self.poke()

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        """The state as it is now; payloads of what follows are kept for the learner."""
        assert self.applied == effect.position, f"{self.applied} is applied, not {effect.position}"
        self.host.keeps_payloads = True
        link = self.links.get(effect.to)
        if link is not None:
            link.post(snapshot_sender(self.host, effect.incarnation, effect.position))

    def receive_snapshot(
        self, sender: int, header: Header, meta: bytes, connection: Connection
    ) -> None:
        """At a learner; a snapshot for an earlier life, or from a former tail, has no effect."""
        if header.argument:
            incoming = self._incoming[sender] = Incoming(connection, read_head(meta))
        else:
            known = self._incoming.get(sender)
            if known is None or known.connection is not connection or known.is_complete:
                raise Refused("a part of a snapshot without its head")
            incoming = known
            limits = (header.payload_bytes, self.host.max_bytes)
            incoming.images.append(read_image(meta, connection, *limits))
            failpoint("snapshot.temporary")
        if incoming.is_complete:
            if self._incoming.get(sender) is incoming:
                del self._incoming[sender]
            failpoint("snapshot.fsync")
            with self.changed:
                self._install(sender, incoming)
                failpoint("snapshot.rename")

    def _install(self, sender: int, incoming: Incoming) -> None:
        node = self.node
        is_wanted = node.incarnation == incoming.head.incarnation and node.takes_snapshot
        if not is_wanted or sender != node.config.tail:
            return
        for image, tensors in incoming.images:
            install_image(self.host, image, tensors)
        self.applied = incoming.head.position
        self._run(node.install(incoming.head.position))

    # ------------------------------------------------------------------ lost workers

    def _note_loss(self, model: int, worker: int, reason: str) -> None:
        """Called under the lock of a model: only noted, for a thread without it."""
        self._losses.setdefault((model, worker), reason)
        self._loss_noted.set()

    def _lose_workers(self) -> None:
        """The thread of the losses; only the head has any effect."""
        while not self._is_closed:
            self._loss_noted.wait(_POLL_S)
            self._loss_noted.clear()
            self._note_absent()
            for (model, worker), reason in list(self._losses.items()):
                with suppress(Elsewhere, ModelFailure, ShoalError):
                    if self.is_head:
                        self.execute(Lost(model, worker, reason))
                self._losses.pop((model, worker), None)

    def _note_absent(self) -> None:
        """Workers that do not connect to a head that is new to them."""
        present = {
            (number, worker)
            for number, model in list(self.host.models.items())
            for worker, member in list(model.membership.members.items())
            if not member.channels and worker not in model.membership.departed
        }
        now_s = time.monotonic()
        is_head = self.is_head
        self._absent = {key: self._absent.get(key, now_s) for key in present if is_head}
        for (number, worker), since_s in self._absent.items():
            if now_s - since_s > ABSENT_S:
                reason = f"worker {worker} was lost: it has not come to the new head"
                self._losses.setdefault((number, worker), reason)


def _kept_bytes(proposed: Proposed) -> int:
    return min(proposed.payload.nbytes + _OPERATION_BYTES, MAX_KEPT_BYTES // 4)


def _pass(name: str, operation: Operation) -> None:
    if isinstance(operation, Pushed):
        failpoint(name)


def _pass_message(name: str, message: ChainMessage) -> None:
    if isinstance(message, Append | Teach) and message.op is not None:
        _pass(name, message.op.operation)


def _is_released(proposed: Proposed) -> bool:
    """Whether all members say when they have applied it, beside that they have it."""
    operation = proposed.operation
    return isinstance(operation, Pushed) and operation.lent == "at once"


def _keeps_order(effect: Effect) -> bool:
    """A snapshot is of this moment. A push that is lent in turn is acknowledged when applied."""
    if not isinstance(effect, Apply):
        return isinstance(effect, SendSnapshot)
    operations = (entry.op.operation for entry in effect.entries)
    return any(isinstance(each, Pushed) and each.lent == "in turn" for each in operations)


def _is_missed(message: ChainMessage, node: ChainNode) -> bool:
    """Whether its payload was skipped though its entry is not in the log."""
    if not isinstance(message, Append | Teach) or message.op is not None:
        return False
    return message.epoch == node.epoch and message.position > node.position


def _without_operation(message: Append | Teach) -> Append | Teach:
    if isinstance(message, Append):
        return Append(message.epoch, message.position, message.committed, None)
    return Teach(message.epoch, message.position, None)


def _with_operation(message: Append | Teach, op: Proposed) -> Append | Teach:
    if isinstance(message, Append):
        return Append(message.epoch, message.position, message.committed, op)
    return Teach(message.epoch, message.position, op)


def _committed_alone(message: Append, position: int) -> Append:
    """The same news of what is committed, with an entry that is known already."""
    return Append(message.epoch, position, message.committed, None)
