"""Reads the copies of a shard one after the other, to compare them."""

from __future__ import annotations

from shoal.server.chain_link import ChainLink
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, decode, encode
from shoal.server.protocol.messages import Pull, Pulled
from shoal.server.request import Request

_ASK_S = 5.0


class CopyReader:
    """Connections of its own to all members but the one that this worker pulls from."""

    def __init__(self, link: ChainLink):
        self._link = link
        self._connections: dict[int, Connection] = {}

    def versions(self) -> list[int]:
        """What each member shows, the updates of its weights; in the order of the chain."""
        return [self._version(replica) for replica in self._link.view.members]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _version(self, replica: int) -> int:
        link = self._link
        request = Request(FrameKind.PULL, encode(Pull(None, 0)), into=None)
        if replica == link.reader:
            return decode(link.post("pull", request).result().meta, Pulled).version
        if replica not in self._connections:
            self._connections[replica] = link.connect_reader(replica, _ASK_S)
        connection = self._connections[replica]
        return decode(link.ask(connection, request), Pulled).version
