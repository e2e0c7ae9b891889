"""What a worker asks a server, as a value that can be sent again; and why it was not answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import PeerLost
from shoal.protocol.frames import FrameKind
from shoal.protocol.hello import Moved


@dataclass(frozen=True)
class Request:
    """One frame to a server, and where the payload of its answer goes.

    `into=None` accepts an answer of any length. A request without an answer is acknowledged by
    the answer to a later request of the same channel. A light one and its answer are short: the
    caller sends it when it is posted, and reads the answer when it waits. `descriptor` is an open
    file that goes with it (Unix sockets).
    """

    kind: FrameKind
    meta: bytes = b""
    payload: tuple[memoryview, ...] = ()
    into: tuple[memoryview, ...] | None = ()
    sequence: int = 0
    argument: int = 0
    is_answered: bool = True
    is_light: bool = False
    descriptor: int | None = None


class Reply(NamedTuple):
    """The answer to a request. `payload` is empty if the request had a place for it."""

    meta: bytes
    payload: bytearray


class Broken(PeerLost):
    """A connection ended before a request was answered; another try may mend it."""


class MovedAway(Broken):
    """This server is not the one to ask, and nothing of the request has had an effect on it."""

    def __init__(self, rank: int, doing: str, moved: Moved, reason: str):
        super().__init__(rank, None, f"{doing} ({reason})")
        self.moved = moved
