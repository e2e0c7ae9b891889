"""A request to a server, as an operation of a work queue."""

from __future__ import annotations

from typing import Any, Protocol

from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import ShoalError
from shoal.server.protocol.hello import Channel
from shoal.server.request import Reply, Request


class RequestCaller(Protocol):
    """What a `ServerLink` gives."""

    def send_ahead(self, channel: Channel, request: Request) -> bool: ...
    def call(self, channel: Channel, request: Request, was_sent: bool = False) -> Reply: ...


class PostedRequest(QueuedWork):
    """A request that is carried out in the background."""

    __slots__ = ("_channel", "_failure", "_link", "_reply", "_request")

    def __init__(self, queue: WorkQueue, link: RequestCaller, channel: Channel, request: Request):
        super().__init__(queue)
        self._link = link
        self._channel = channel
        self._request = request
        self._failure: ShoalError | None = None

    def begin(self, *arguments: Any) -> bool:
        try:
            return self._request.is_light and self._link.send_ahead(self._channel, self._request)
        except ShoalError as error:
            self._failure = error  # for the one who waits
            return True

    def run(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._reply = self._link.call(self._channel, self._request, self.begun)

    def result(self) -> Reply:
        """Wait for the answer."""
        self.wait()
        return self._reply
