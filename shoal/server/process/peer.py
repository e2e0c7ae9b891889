"""One connection of one worker, or of another server: checks each frame, and calls its handler.

A worker has one connection per channel. When a TCP connection breaks, the worker opens another
one; the server gives up the worker if it does not, or has exited. A broken Unix socket is the end
of a process, unless servers have replicas.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from shoal.errors import BadInput
from shoal.runtime import clock
from shoal.server.member.operations import Operation, Payload
from shoal.server.member.place import Elsewhere
from shoal.server.model.membership import POLL_S, ActiveConnection, Member, ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.model.tables import TableReader
from shoal.server.process.model_host import ModelHost
from shoal.server.protocol import (
    MAX_META_BYTES,
    Channel,
    ErrorReply,
    FrameKind,
    Header,
    Refused,
    decode,
    encode,
)
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.handshake import RECONNECT_S
from shoal.server.rows.memory import RowBuffer

T = TypeVar("T")
_MAX_SHORT_META_BYTES = 64 << 10
_TRACED = {"push": "push", "pull": "pull", "rows": "pull"}  # channel: the kind of its spans
_PULL_BYTES = 64 << 10  # a request for 4,000 rows is read at once
_UNANSWERED = {FrameKind.BUCKET, FrameKind.COMPRESSED, FrameKind.TABLE_PUSH}
_OF_ANY_MEMBER = {
    *(FrameKind.SETUP, FrameKind.STATS),
    *(FrameKind.PULL, FrameKind.STATE_GET, FrameKind.RESIDUAL_GET),
    *(FrameKind.TABLE_PULL, FrameKind.TABLE_GET),
}


Handler = Callable[["Peer", Header, Any], None]


class Registered(NamedTuple):
    handler: Handler
    channel: Channel
    message: type | None
    has_payload: bool


HANDLERS: dict[FrameKind, Registered] = {}


def handles(
    kind: FrameKind, channel: Channel, message: type | None = None, has_payload: bool = False
) -> Callable[[Handler], Handler]:
    """The handler gets the metadata as a `message`; None: as bytes. The worker has joined."""

    def register(handler: Handler) -> Handler:
        assert kind not in HANDLERS, f"{kind.name} has two handlers"
        HANDLERS[kind] = Registered(handler, channel, message, has_payload)
        return handler

    return register


class Peer:
    """The other end of a connection: which worker it is, and its channel in a model."""

    model: ServedModel  # both from `enter` on
    member: Member

    def __init__(
        self, host: ModelHost, connection: Connection, channel: Channel, header: Header, number: int
    ):
        self.host = host
        self.connection = connection
        self.channel: Channel = channel
        self.worker = header.worker
        self.incarnation = header.incarnation
        self.model_id = header.model
        self.has_entered = False
        self.ok = Header(FrameKind.OK, self.worker, self.model_id)
        self.has_reconnected = False
        self.shared_bytes = 0  # that the worker takes from memory which it shares
        self.table_reader = TableReader()
        self.row_buffer = RowBuffer()
        self._moved: Elsewhere | None = None
        self._active = ActiveConnection(threading.get_ident(), connection.abort, number)

    def check_joined(self) -> None:
        if not self.has_entered:
            raise Refused(f"worker {self.worker} has not joined this model")
        if self.model.membership.members.get(self.worker) is not self.member:
            raise Refused(f"worker {self.worker} was started again: its former process is refused")

    def check_size(self, header: Header, num_bytes: int) -> None:
        if header.payload_bytes != num_bytes:
            kind = header.kind.name
            raise Refused(f"expected {num_bytes} bytes of {kind}, got {header.payload_bytes}")

    def execute_with_payload(self, operation: Operation, header: Header) -> None:
        """Read its payload, let it take effect, and answer; the length is checked before."""
        num_bytes = operation.payload_bytes(self.model)
        self.check_size(header, num_bytes)
        data = bytearray(num_bytes)
        self.connection.read_into(memoryview(data))
        self.host.execute(operation, Payload(data))
        self.reply()

    @contextmanager
    def descriptor(self, is_needed: bool = False) -> Iterator[int | None]:
        """What has been passed with the frame; it is closed at the end."""
        passed = self.connection.take_descriptor()
        if passed is None and is_needed:
            raise Refused("memory is shared, and arrives without a descriptor")
        try:
            yield passed
        finally:
            if passed is not None:
                os.close(passed)

    def reply(self, meta: bytes = b"", *payload: memoryview) -> None:
        """Once all that the answer may follow from is committed."""
        if self.host.chain is not None:
            self.host.chain.await_committed()
        self.reply_committed(meta, *payload)

    def reply_committed(self, meta: bytes = b"", *payload: memoryview) -> None:
        """With what `execute` or `read` returned, and nothing else of the state."""
        self.host.slowness.pay()
        self.connection.send(self.ok, meta, *payload)

    def reply_error(self, error: ErrorReply) -> None:
        self.connection.send(Header(FrameKind.ERROR, self.worker, self.model_id), encode(error))

    def _start(self) -> None:
        """Take the channel of a worker that has joined; a control connection may join later."""
        chain = self.host.chain
        if chain is not None and self.channel != "chain":
            chain.catch_up()
        if self.channel not in ("control", "push", "pull", "rows"):
            return
        model = self.host.models.get(self.model_id)
        member = None if model is None else model.membership.members.get(self.worker)
        if model is not None and member is not None and member.incarnation == self.incarnation:
            self.has_reconnected = self.channel == "control"
            self.enter(model)
        elif self.channel != "control" and chain is not None:  # it lost its state since then
            raise chain.elsewhere(f"does not know worker {self.worker}")
        elif self.channel != "control":
            self.check_joined()

    def enter(self, model: ServedModel) -> None:
        """Serve this channel from now on; an earlier connection of the worker is displaced."""
        member = model.membership.members[self.worker]
        with model.lock:
            while (active := member.channels.get(self.channel)) is not None:
                self._displace(model, member, active)
            self.model = model
            self.member = member
            self.has_entered = True
            member.channels[self.channel] = self._active
            if self.channel == "push":
                member.pushes.begin()  # it is sent again from its start
            if self.channel in member.broken:  # an earlier connection may wait for this one
                model.lock.notify_all()

    def end(self, is_broken: bool) -> None:
        """The connection has ended; `is_broken`: the other side may connect again."""
        if not self.has_entered:
            return
        membership = self.model.membership
        if not self._returns(is_broken):
            chain = self.host.chain
            is_here = self.host.models.get(self.model_id) is self.model
            # in a chain the head loses a worker, once none of its connections is left
            if chain is None or (is_here and chain.node.is_head and not self.member.channels):
                membership.lose(self.worker, self.incarnation)
        membership.lose_absent()
        self.host.release(self.model_id)

    def read(self, action: Callable[[], T]) -> T:
        """What the state holds, with everything that was acknowledged before."""
        chain = self.host.chain
        return action() if chain is None else chain.read(action)

    def _displace(self, model: ServedModel, member: Member, active: ActiveConnection) -> None:
        """End the connection that served this channel so far, and wait until it has ended.

        Its thread may not have noticed that the worker has connected again. Several connections
        may wait to replace it; all but the last are broken by then.
        """
        if active.number > self._active.number:
            raise Closed("the worker has connected again")
        if not self.connection.is_unix or self.host.in_chain:
            model.membership.displaced.add(active.thread)
            active.abort()
            model.lock.notify_all()
            model.lock.wait_for(
                lambda: member.channels.get(self.channel) is not active, RECONNECT_S
            )
        if member.channels.get(self.channel) is active:
            raise Refused(f"worker {self.worker} has a {self.channel} connection already")

    def _returns(self, is_broken: bool) -> bool:
        """Give up the channel; whether the worker comes back with another connection."""
        model = self.model
        channels = self.member.channels
        membership = self.model.membership
        with model.lock:
            if channels.get(self.channel) is self._active:
                del channels[self.channel]
            membership.displaced.discard(self._active.thread)
            model.lock.notify_all()
            if not is_broken or (self.connection.is_unix and not self.host.in_chain):
                return False
            self.connection.abort()
            self.member.broken.add(self.channel)
            until_s = clock.monotonic() + RECONNECT_S

            def is_decided() -> bool:
                is_over = membership.failure is not None or self.worker in membership.departed
                return is_over or self.channel in channels or clock.monotonic() >= until_s

            while not model.lock.wait_for(is_decided, POLL_S):
                if membership.has_exited is not None and membership.has_exited(self.worker):
                    break
            return self.channel in channels

    def run(self) -> None:
        is_broken = False
        try:
            self._start()
            if self.channel == "chain":
                self.connection.read_ahead()
            elif self.channel == "rows":
                self.connection.read_ahead(_PULL_BYTES)
            while True:
                self._serve_one()
        except Closed:
            is_broken = True
        except Elsewhere as elsewhere:  # before the first frame
            with suppress(Closed):
                self.reply_error(elsewhere.reply)
        except Refused:
            raise
        except BadInput as error:
            raise Refused(str(error)) from error
        except Exception as error:  # of an optimizer, for example: its update never comes
            if self.has_entered:
                self.model.fail(f"server {self.model.spec.index} failed: {error!r}"[:4000])
            raise Refused(f"the server failed: {error!r}"[:4000]) from error
        finally:
            self.end(is_broken)

    def _serve_one(self) -> None:
        header, meta = self.connection.receive(self._max_meta_bytes())
        registered = self._check(header)
        slowness = self.host.slowness
        connection = self.connection
        end_bytes = connection.received_bytes + header.payload_bytes
        start_ns = clock.monotonic_ns()
        before_bytes = connection.sent_bytes + self.shared_bytes
        try:
            slowness.begin()
            self._check_place(header)
            if self.channel not in ("follow", "chain") and header.kind is not FrameKind.SETUP:
                self.check_joined()
            message = registered.message
            registered.handler(self, header, meta if message is None else decode(meta, message))
            slowness.pay()
            if self.host.tracer.enabled and self.channel in _TRACED:
                num_bytes = connection.sent_bytes + self.shared_bytes - before_bytes
                track = f"{self.channel} rank {self.worker}"
                self.host.tracer.add(
                    _TRACED[self.channel],
                    start_ns,
                    clock.monotonic_ns(),
                    track,
                    header.kind.name,
                    None,
                    num_bytes,
                    self.worker,
                )
        except ModelFailure as failure:
            connection.skip(end_bytes - connection.received_bytes)
            error = ErrorReply(failure.reason, failure.worker, is_loss=failure.is_loss)
            self.reply_error(error)
        except Elsewhere as elsewhere:
            connection.skip(end_bytes - connection.received_bytes)
            self._moved = elsewhere  # what follows would lack what was refused
            if header.kind not in _UNANSWERED:
                self.reply_error(elsewhere.reply)

    def _check_place(self, header: Header) -> None:
        """Elsewhere if a replicated server may not serve this frame."""
        chain = self.host.chain
        if chain is None or self.channel == "chain":
            return
        if self.channel != "follow":
            chain.check_epoch(header.epoch)
        if self._moved is not None:
            raise self._moved
        if header.kind not in _OF_ANY_MEMBER and not chain.node.is_head:
            raise chain.elsewhere("is not the head of its chain")

    def _check(self, header: Header) -> Registered:
        registered = HANDLERS.get(header.kind)
        if registered is None or registered.channel != self.channel:
            raise Refused(f"{header.kind.name} is not allowed on a {self.channel} connection")
        if (header.worker, header.incarnation) != (self.worker, self.incarnation):
            raise Refused(f"worker {self.worker} sends as worker {header.worker}")
        if header.model != self.model_id or (header.epoch and self.host.chain is None):
            raise Refused("a frame of another model or epoch")
        if header.payload_bytes and not registered.has_payload:
            raise Refused(f"{header.kind.name} has no payload")
        return registered

    def _max_meta_bytes(self) -> int:
        """Descriptions of a model and of its state are long; everything else is short."""
        is_joining = self.channel == "control" and (not self.has_entered or self.has_reconnected)
        is_long = is_joining or self.channel in ("pull", "chain")
        return MAX_META_BYTES if is_long else _MAX_SHORT_META_BYTES
