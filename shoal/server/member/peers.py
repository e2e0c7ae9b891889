"""A chain member and the others: their messages, and the snapshot that brings one back.

The threads of the connections that other members have made call `receive` and `receive_snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.protocol.connection import Connection
from shoal.protocol.frames import Header, Refused
from shoal.runtime.failpoints import failpoint
from shoal.server.chain.entries import WHILE_APPLYING
from shoal.server.chain.messages import Acked, Append, ChainMessage, Teach
from shoal.server.chain.node import ChainNode
from shoal.server.member.core import ChainCore, pass_push
from shoal.server.member.place import ChainPlace
from shoal.server.member.snapshots import Incoming, install_image, read_head, read_image
from shoal.server.member.wire import Proposed, decode_message, read_payload, with_op
from shoal.server.process.model_host import ModelHost


class ChainPeers(ChainCore):
    """What the other members bring to the node of this one."""

    def __init__(self, place: ChainPlace, host: ModelHost, on_reset: Callable[[], None]):
        super().__init__(place, host, on_reset)
        self._incoming: dict[int, Incoming] = {}  # snapshots, by sender

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        """A message of another copy; its payload is read without the lock."""
        message, operation = decode_message(meta)
        if operation is None:
            if header.payload_bytes:
                raise Refused(f"{type(message).__name__} has no payload")
            self.deliver(sender, message)
            return
        assert isinstance(message, Append | Teach)
        pass_push("push.received", operation)
        if not self._expects(sender, message):
            connection.skip(header.payload_bytes)
            self.deliver(sender, with_op(message, None))
            return
        pass_push("push.deduplicated", operation)
        payload = read_payload(self.host, operation, connection, header.payload_bytes)
        pass_push("push.validated", operation)
        self.deliver(sender, with_op(message, Proposed(operation, payload)))

    def _expects(self, sender: int, message: Append | Teach) -> bool:
        """Whether this message would be appended, as far as can be said without the lock."""
        node = self.node
        if message.epoch != node.epoch or message.position != node.position + 1:
            return False
        if isinstance(message, Teach):
            return not node.is_member and sender == node.config.tail
        return sender == node.predecessor

    def deliver(self, sender: int, message: ChainMessage) -> None:
        if not isinstance(message, WHILE_APPLYING):
            with self.settled():
                self.run(self.node.receive(sender, message))
            return
        with self.changed:
            node = self.node
            if _is_missed(message, node):
                self.run(node.link_up(sender))  # let it be sent again
                return
            effects = node.receive(sender, message)
            _pass_message("push.logged", message)
            self.run(effects)
            logged = node.position
        if not isinstance(message, Acked):
            self.apply_upto(logged)
            _pass_message("push.acknowledged", message)

    # ------------------------------------------------------------------ a learner

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
            with self.settled():
                self._install_snapshot(sender, incoming)
                failpoint("snapshot.rename")

    def _install_snapshot(self, sender: int, incoming: Incoming) -> None:
        node = self.node
        is_wanted = node.incarnation == incoming.head.incarnation and node.takes_snapshot
        if not is_wanted or sender != node.config.tail:
            return
        for image, tensors in incoming.images:
            install_image(self.host, image, tensors)
        self.applied = incoming.head.position
        self.run(node.install(incoming.head.position))


def _pass_message(name: str, message: ChainMessage) -> None:
    if isinstance(message, Append | Teach) and message.op is not None:
        pass_push(name, message.op.operation)


def _is_missed(message: ChainMessage, node: ChainNode) -> bool:
    """Whether its payload was skipped though its entry is not in the log."""
    if not isinstance(message, Append | Teach) or message.op is not None:
        return False
    return message.epoch == node.epoch and message.position > node.position
