"""Frames of the other replicas: what they bring to the node of this one."""

from __future__ import annotations

from shoal.server.chain.messages import Acked, Append, ChainMessage, Teach
from shoal.server.chain.node import ChainNode
from shoal.server.chain.unapplied import WHILE_APPLYING
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Refused
from shoal.server.replicas.core import ReplicaCore, pass_push
from shoal.server.replicas.payloads import read_payload
from shoal.server.replicas.wire import Proposed, decode_message, with_op


class PeerFrames:
    """Called by the threads of the connections that other replicas have made."""

    def __init__(self, core: ReplicaCore):
        self._core = core

    def receive(self, sender: int, header: Header, meta: bytes, connection: Connection) -> None:
        """A message of another replica; its payload is read without the lock."""
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
        payload = read_payload(self._core.host, operation, connection, header.payload_bytes)
        pass_push("push.validated", operation)
        self.deliver(sender, with_op(message, Proposed(operation, payload)))

    def _expects(self, sender: int, message: Append | Teach) -> bool:
        """Whether this message would be appended, as far as can be said without the lock."""
        node = self._core.node
        if message.epoch != node.epoch or message.position != node.position + 1:
            return False
        if isinstance(message, Teach):
            return not node.is_member and sender == node.config.tail
        return sender == node.predecessor

    def deliver(self, sender: int, message: ChainMessage) -> None:
        core = self._core
        if not isinstance(message, WHILE_APPLYING):
            with core.settled():
                core.run(core.node.receive(sender, message))
            return
        with core.changed:
            node = core.node
            if _is_missed(message, node):
                core.run(node.link_up(sender))  # let it be sent again
                return
            effects = node.receive(sender, message)
            _pass_message("push.logged", message)
            core.run(effects)
            logged = node.position
        if not isinstance(message, Acked):
            core.apply_upto(logged)
            _pass_message("push.acknowledged", message)


def _pass_message(name: str, message: ChainMessage) -> None:
    if isinstance(message, Append | Teach) and message.op is not None:
        pass_push(name, message.op.operation)


def _is_missed(message: ChainMessage, node: ChainNode) -> bool:
    """Whether its payload was skipped though its entry is not in the log."""
    if not isinstance(message, Append | Teach) or message.op is not None:
        return False
    return message.epoch == node.epoch and message.position > node.position
