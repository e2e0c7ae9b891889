"""The answer of a replica that must not serve a request."""

from __future__ import annotations

from shoal.server.chain.config import ChainConfig
from shoal.server.protocol.hello import ErrorReply, Moved


class Elsewhere(Exception):
    """Another replica is to be asked, or this one in the present epoch."""

    def __init__(self, config: ChainConfig, reason: str):
        super().__init__(reason)
        self.moved = Moved(config.epoch, config.head, config.members)

    @property
    def reply(self) -> ErrorReply:
        return ErrorReply(str(self)[:4000], moved=self.moved)
