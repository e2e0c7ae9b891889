"""Serves one connection: checks each frame, and hands it to its handler."""

from __future__ import annotations

from contextlib import suppress

from shoal.errors import BadInput
from shoal.protocol.connection import Closed
from shoal.protocol.frames import MAX_META_BYTES, FrameKind, Header, Refused
from shoal.server.member.place import Elsewhere
from shoal.server.messages import ErrorReply
from shoal.server.model.membership import ModelFailure
from shoal.server.process import control_requests, push_requests, rows_requests
from shoal.server.process.peer import HANDLERS, Peer, Registered

HANDLER_MODULES = (control_requests, push_requests, rows_requests)  # they fill the table

_MAX_SHORT_META_BYTES = 64 << 10
_PULL_BYTES = 64 << 10  # a request for 4,000 rows is read at once
_UNANSWERED = {FrameKind.BUCKET, FrameKind.COMPRESSED, FrameKind.TABLE_PUSH}
_OF_ANY_MEMBER = {
    *(FrameKind.SETUP, FrameKind.STATS),
    *(FrameKind.PULL, FrameKind.STATE_GET, FrameKind.RESIDUAL_GET),
    *(FrameKind.TABLE_PULL, FrameKind.TABLE_GET),
}


class Session:
    """From the HELLO of a connection to its end."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self._moved: Elsewhere | None = None

    def run(self) -> None:
        is_broken = False
        try:
            self.peer.start()
            if self.peer.channel == "chain":
                self.peer.connection.read_ahead()
            elif self.peer.channel == "rows":
                self.peer.connection.read_ahead(_PULL_BYTES)
            while True:
                self._serve_one()
        except Closed:
            is_broken = True
        except Elsewhere as elsewhere:  # before the first frame
            with suppress(Closed):
                self.peer.reply_error(elsewhere.reply)
        except Refused:
            raise
        except BadInput as error:
            raise Refused(str(error)) from error
        except Exception as error:  # of an optimizer, for example: its update never comes
            self._fail_model(error)
            raise Refused(f"the server failed: {error!r}"[:4000]) from error
        finally:
            self.peer.end(is_broken)

    def _serve_one(self) -> None:
        header, meta = self.peer.connection.receive(self._max_meta_bytes())
        registered = self._check(header)
        if not self._is_present(header):
            return
        slowness = self.peer.host.slowness
        connection = self.peer.connection
        end_bytes = connection.received_bytes + header.payload_bytes
        try:
            slowness.begin()
            registered.handler(self.peer, header, meta)
            slowness.pay()
        except ModelFailure as failure:
            connection.skip(end_bytes - connection.received_bytes)
            error = ErrorReply(failure.reason, failure.worker, is_loss=failure.is_loss)
            self.peer.reply_error(error)
        except Elsewhere as elsewhere:
            connection.skip(end_bytes - connection.received_bytes)
            self._move(elsewhere, header)

    def _is_present(self, header: Header) -> bool:
        """Whether a replicated server may serve this frame; else it says where to send it."""
        chain = self.peer.host.chain
        if chain is None or self.peer.channel == "chain":
            return True
        try:
            if self.peer.channel != "follow":
                chain.check_epoch(header.epoch)
            if self._moved is not None:
                raise self._moved
            if header.kind not in _OF_ANY_MEMBER:
                chain.check_head()
        except Elsewhere as elsewhere:
            self.peer.connection.skip(header.payload_bytes)
            self._move(elsewhere, header)
            return False
        return True

    def _move(self, elsewhere: Elsewhere, header: Header) -> None:
        """What follows on this connection would lack what was refused."""
        self._moved = elsewhere
        if header.kind not in _UNANSWERED:
            self.peer.reply_error(elsewhere.reply)

    def _check(self, header: Header) -> Registered:
        peer = self.peer
        registered = HANDLERS.get(header.kind)
        if registered is None or registered.channel != peer.channel:
            raise Refused(f"{header.kind.name} is not allowed on a {peer.channel} connection")
        if (header.worker, header.incarnation) != (peer.worker, peer.incarnation):
            raise Refused(f"worker {peer.worker} sends as worker {header.worker}")
        if header.model != peer.model_id or (header.epoch and peer.host.chain is None):
            raise Refused("a frame of another model or epoch")
        if header.payload_bytes and not registered.has_payload:
            raise Refused(f"{header.kind.name} has no payload")
        return registered

    def _max_meta_bytes(self) -> int:
        """Descriptions of a model and of its state are long; everything else is short."""
        peer = self.peer
        is_joining = peer.channel == "control" and (peer.member is None or peer.has_reconnected)
        is_long = is_joining or peer.channel in ("pull", "chain")
        return MAX_META_BYTES if is_long else _MAX_SHORT_META_BYTES

    def _fail_model(self, error: Exception) -> None:
        model = self.peer.model
        if model is not None:
            model.fail(f"server {model.spec.index} failed: {error!r}"[:4000])
