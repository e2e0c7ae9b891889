"""Reads the copies of a shard one after the other, to compare them."""

from __future__ import annotations

from shoal.server.chain_route import ChainRoute
from shoal.server.link import ServerLink
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, decode, encode
from shoal.server.protocol.messages import Pull, Pulled
from shoal.server.request import Request

_ASK_S = 5.0


class CopyReader:
    """Connections of its own to all members but the one that this worker pulls from."""

    def __init__(self, link: ServerLink, route: ChainRoute):
        self._link = link
        self._route = route
        self._connections: dict[int, Connection] = {}

    def versions(self) -> list[int]:
        """What each member shows, the updates of its weights; in the order of the chain."""
        return [self._version(copy) for copy in self._route.view.members]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _version(self, copy: int) -> int:
        route = self._route
        request = Request(FrameKind.PULL, encode(Pull(None, 0)), into=None)
        if copy == route.reader:
            return decode(self._link.post("pull", request).result().meta, Pulled).version
        if copy not in self._connections:
            self._connections[copy] = route.connect_reader(copy, _ASK_S)
        connection = self._connections[copy]
        return decode(route.ask(connection, request), Pulled).version
