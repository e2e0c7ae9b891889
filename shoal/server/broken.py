"""Requests of a worker that were not answered, for reasons that another try may mend."""

from __future__ import annotations

from shoal.errors import PeerLost
from shoal.server.protocol.hello import Moved


class Broken(PeerLost):
    """A connection ended before a request was answered."""


class MovedAway(Broken):
    """This server is not the one to ask, and nothing of the request has had an effect on it."""

    def __init__(self, rank: int, doing: str, moved: Moved, reason: str):
        super().__init__(rank, None, f"{doing} ({reason})")
        self.moved = moved
