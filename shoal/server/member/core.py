"""One chain member: its node, how its effects are carried out, and what other members bring to it.

    changed       guards the node and all that belongs to it; held for microseconds
    applying      held while operations are applied, one after the other, in the order of the log

A thread that takes both takes `applying` first. No thread that holds the lock of a model may wait
for one of them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.server.chain import Entry, messages, take
from shoal.server.chain.manager import ChainManager, ReadLease
from shoal.server.chain.node import ChainNode
from shoal.server.consistency import Count
from shoal.server.member import operations
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import ChainPlace, Elsewhere
from shoal.server.messages import WireMessage
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import DTYPES
from shoal.server.model.snapshot import ModelImage, image_of, install
from shoal.server.process.model_host import MAX_MODELS, ModelHost
from shoal.server.protocol import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.connection import Connection
from shoal.server.shared_memory import bytes_of


class Snapshot(WireMessage, frozen=True):
    """Their tensors are the payload, in the same order."""

    incarnation: Count
    position: Count
    images: Annotated[tuple[ModelImage, ...], msgspec.Meta(max_length=MAX_MODELS)]


def snapshot_sender(
    host: ModelHost, incarnation: int, position: int
) -> Callable[[Connection, Header], None]:
    """Copy the state now; the function that is returned sends it."""
    found = [image_of(number, model) for number, model in sorted(host.models.items())]
    meta = encode(Snapshot(incarnation, position, tuple(image for image, _ in found)))
    views = [bytes_of(tensor) for _, tensors in found for tensor in tensors]

    def send(connection: Connection, header: Header) -> None:
        connection.send(header._replace(kind=FrameKind.SNAPSHOT), meta, *views)

    return send


def read_snapshot(
    meta: bytes, connection: Connection, num_bytes: int, max_bytes: int
) -> tuple[Snapshot, list[torch.Tensor]]:
    """Refused, before anything is allocated, where the lengths do not fit."""
    snapshot = decode(meta, Snapshot)
    forms = [form for image in snapshot.images for form in image.tensors]
    expected = sum(math.prod(form.shape) * DTYPES[form.dtype].itemsize for form in forms)
    if num_bytes != expected or expected > max_bytes:
        raise Refused(f"a snapshot of {num_bytes} bytes, expected {expected}")
    tensors = [torch.empty(form.shape, dtype=DTYPES[form.dtype]) for form in forms]
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return snapshot, tensors


def install_images(host: ModelHost, snapshot: Snapshot, tensors: list[torch.Tensor]) -> None:
    """Hold the models in this state; Refused if tensors and description do not fit."""
    source = iter(tensors)
    for image in snapshot.images:
        model = host.hold(image.number, image.saved.spec)
        try:
            with model.lock:
                install(model, image, source)
                model.lock.notify_all()
        except (StopIteration, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"the state of another copy does not fit: {error}") from error


MAX_KEPT_BYTES = 1 << 30  # of pushes, for a copy that catches up; at least 4 of them
_OPERATION_BYTES = 512  # about, without a payload


Outcome = tuple[Any, Exception | None]  # the answer, or why there is none


@dataclass
class Waiter:
    """A thread that waits for one operation: it is woken alone, and once."""

    node: ChainNode
    position: int
    is_early: bool  # it is answered before it is committed
    on_committed: operations.OnCommitted | None = None
    outcome: Outcome | None = None
    woken: threading.Lock = field(default_factory=lambda: clock.Lock())  # held until it is woken

    def __post_init__(self) -> None:
        self.woken.acquire()


class Waiters(dict[int, Waiter]):
    """By the position of the operation; guarded by the copy's lock."""

    def applied(self, position: int, outcome: Outcome) -> None:
        """It has been applied here."""
        if position in self:
            self[position].outcome = outcome
            if self[position].is_early:
                self.wake(position)

    def wake(self, position: int) -> None:
        waiter = self.pop(position, None)
        if waiter is None:
            return
        answer, error = waiter.outcome or (None, None)
        if waiter.on_committed is not None and waiter.outcome is not None and error is None:
            waiter.on_committed(answer)
        waiter.woken.release()

    def end_all(self) -> None:
        """This copy was removed: what it has applied and not committed counts for nothing."""
        for position in list(self):
            self[position].outcome = None
            self.wake(position)


class ChainCore:
    """All but `place`, `host` and `lease` is guarded by `changed`, which is notified of news."""

    def __init__(self, place: ChainPlace, host: ModelHost, on_reset: Callable[[], None]):
        """`on_reset`: this copy has lost its place."""
        self.place = place
        self.host = host
        self.changed = clock.Condition()
        self.applying = clock.Lock()
        self.links: dict[int, PeerLink] = {}
        self.lease = ReadLease()
        self.poke: Callable[[], None] = lambda: None  # the keeper is to look at the coordinator
        self.on_applied: Callable[[], None] = lambda: None
        self.losses: dict[tuple[int, int], str] = {}  # (model, worker) -> reason
        self.on_loss: Callable[[], None] = lambda: None
        self.applied = 0
        self.waiters = Waiters()
        self.is_closed = False
        self._on_reset = on_reset
        self._unapplied: deque[Entry] = deque()  # taken under `applying`
        self._uncommitted: deque[int] = deque()  # positions that are applied
        self._unshared: deque[tuple[int, ServedModel, int]] = deque()  # position, log's position
        self._new_node(time.time_ns())

    def _new_node(self, incarnation: int) -> None:
        place = self.place
        self.node = ChainNode(place.copy, incarnation, place.consistency, place.copies)
        self.node.weigh = lambda op: min(op.payload.nbytes + _OPERATION_BYTES, MAX_KEPT_BYTES // 4)
        self.node.max_weight = MAX_KEPT_BYTES
        founders = tuple(range(place.copies))
        self.manager = ChainManager(self.node, founders, self.lease)

    def elsewhere(self, reason: str) -> Elsewhere:
        return Elsewhere(self.node.config, f"{self.place.in_words()} {reason}")

    # ------------------------------------------------------------------ news from outside

    def note_loss(self, model: int, worker: int, reason: str) -> None:
        """Called under the lock of a model: only noted, for a thread without it."""
        self.losses.setdefault((model, worker), reason)
        self.on_loss()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Under both locks: all that is logged is applied."""
        with self.applying, self.changed:
            while (entry := take(self._unapplied)) is not None:
                self._apply(entry.position, entry.op)
            yield

    def link_up(self, peer: int) -> None:
        with self.settled():
            self.run(self.node.link_up(peer))

    def link_lost(self, peer: int) -> None:
        with self.settled():
            self.run(self.node.link_lost(peer))
        self.poke()

    def reconfigure(self, change: Callable[[ChainManager], list[messages.Effect]]) -> None:
        """The keeper has an answer of the coordinator."""
        with self.settled():
            before = self.node.config
            self.run(change(self.manager))
            if self.node.config != before:
                is_full = len(self.node.config.members) == self.place.copies
                self.host.keeps_payloads = self.node.is_tail and not is_full
                self.changed.notify_all()

    # ------------------------------------------------------------------ effects, under the lock

    def run(self, effects: list[messages.Effect]) -> None:
        """Operations are applied later, by `apply_upto`: others can go on meanwhile."""
        for effect in effects:
            self._carry_out(effect)
        self._note_news()

    def _note_news(self) -> None:
        """Clients hear of what is committed, other shards of decisions that all members have."""
        committed = self.node.committed
        while self._uncommitted and self._uncommitted[0] <= committed:
            self.waiters.wake(self._uncommitted.popleft())
        while self._unshared and self._unshared[0][0] <= committed:
            _, model, position = self._unshared.popleft()
            with model.lock:
                model.log.shared = position
                model.lock.notify_all()
        self.changed.notify_all()

    def _carry_out(self, effect: messages.Effect) -> None:
        if isinstance(effect, messages.Send):
            if effect.to in self.links:
                self.links[effect.to].post(effect.message)
        elif isinstance(effect, Entry):
            self._unapplied.append(effect)
        elif isinstance(effect, messages.Reset):
            self._reset()
        elif isinstance(effect, messages.SendSnapshot):
            assert self.applied == effect.position, f"{self.applied}, not {effect.position}"
            self.host.keeps_payloads = True  # of what follows, for the learner
            if effect.to in self.links:
                send = snapshot_sender(self.host, effect.incarnation, effect.position)
                self.links[effect.to].post(send)
        elif isinstance(effect, messages.Disconnect):
            if effect.to in self.links:
                self.links[effect.to].reconnect()
        else:
            assert isinstance(effect, messages.Refetch | messages.ChangeConfig)
            self.manager.look()
            self.poke()

    # ------------------------------------------------------------------ applying

    def apply_upto(self, position: int) -> None:
        """Apply what is logged up to there, without the lock."""
        with self.applying:
            while (entry := take(self._unapplied, position)) is not None:
                self._apply(entry.position, entry.op)

    def _apply(self, position: int, proposed: operations.Proposed) -> None:
        outcome = self._outcome_of(proposed)
        with self.changed:
            self.applied = position
            self._uncommitted.append(position)
            model = self.host.models.get(proposed.operation.model)
            if model is not None and model.log.shared not in (None, model.log.position):
                self._unshared.append((position, model, model.log.position))
            self.waiters.applied(position, outcome)
            self._note_news()
        self.on_applied()

    def _outcome_of(self, proposed: operations.Proposed) -> Outcome:
        try:
            return proposed.operation.apply(self.host, proposed.payload), None
        except (Refused, ModelFailure) as error:
            return None, error
        except ShoalError as error:
            return None, Refused(str(error))
        except Exception as error:  # of an optimizer: the same in all copies
            reason = f"{self.place.in_words()} failed: {error!r}"[:4000]
            if (model := self.host.models.get(proposed.operation.model)) is not None:
                model.fail(reason)
            return None, ModelFailure(reason)

    def _reset(self) -> None:
        """It has lost its place: begin again without state, as a learner."""
        incarnation = max(time.time_ns(), self.node.incarnation + 1)
        self.waiters.end_all()
        self._unapplied.clear()
        self._unshared.clear()
        self._uncommitted.clear()
        self.applied = 0
        self._new_node(incarnation)
        self.losses.clear()
        self._on_reset()
        self.host.clear("this server was removed from its chain")
        self.manager.look()
        self.poke()

    # ------------------------------------------------------------------ the other members

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        """A message of another copy; its payload is read without the lock."""
        message, operation = operations.decode_message(meta)
        if operation is None:
            if header.payload_bytes:
                raise Refused(f"{type(message).__name__} has no payload")
            self.deliver(sender, message)
            return
        assert isinstance(message, messages.Append | messages.Teach)
        if not self._expects(sender, message):
            connection.skip(header.payload_bytes)
            self.deliver(sender, operations.with_op(message, None))
            return
        payload = operations.read_payload(self.host, operation, connection, header.payload_bytes)
        self.deliver(sender, operations.with_op(message, operations.Proposed(operation, payload)))

    def _expects(self, sender: int, message: messages.Append | messages.Teach) -> bool:
        """Whether this message would be appended, as far as can be said without the lock."""
        node = self.node
        if message.epoch != node.epoch or message.position != node.position + 1:
            return False
        if isinstance(message, messages.Teach):
            return not node.is_member and sender == node.config.tail
        return sender == node.predecessor

    def deliver(self, sender: int, message: messages.ChainMessage) -> None:
        if not isinstance(message, messages.WHILE_APPLYING):
            with self.settled():
                self.run(self.node.receive(sender, message))
            return
        with self.changed:
            node = self.node
            if isinstance(message, messages.Append | messages.Teach):
                is_new = message.epoch == node.epoch and message.position > node.position
                if message.op is None and is_new:  # its payload was skipped: let it be sent again
                    self.run(node.link_up(sender))
                    return
            self.run(node.receive(sender, message))
            logged = node.position
        if not isinstance(message, messages.Acked):
            self.apply_upto(logged)

    # ------------------------------------------------------------------ a learner

    def receive_snapshot(
        self, sender: int, header: Header, meta: bytes, connection: Connection
    ) -> None:
        """At a learner; a snapshot for an earlier life, or from a former tail, has no effect."""
        snapshot, tensors = read_snapshot(
            meta, connection, header.payload_bytes, self.host.max_bytes
        )
        with self.settled():
            node = self.node
            is_wanted = node.incarnation == snapshot.incarnation and node.takes_snapshot
            if is_wanted and sender == node.config.tail:
                install_images(self.host, snapshot, tensors)
                self.applied = snapshot.position
                self.run(node.install(snapshot.position))
