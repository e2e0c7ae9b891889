"""The table of messages: which function handles which kind of frame.

A handler is a function of a peer, a header and metadata. `@handles` puts it into the table, with
the channel on which the message is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.server.peer import Peer
from shoal.server.protocol.frames import FrameKind, Header
from shoal.server.protocol.messages import Channel

Handler = Callable[[Peer, Header, bytes], None]


class Registered(NamedTuple):
    handler: Handler
    channel: Channel
    has_payload: bool


HANDLERS: dict[FrameKind, Registered] = {}


def handles(
    kind: FrameKind, channel: Channel, has_payload: bool = False
) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        assert kind not in HANDLERS, f"{kind.name} has two handlers"
        HANDLERS[kind] = Registered(handler, channel, has_payload)
        return handler

    return register
