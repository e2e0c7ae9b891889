"""How long a worker got no service of a shard around each change of its chain."""

from __future__ import annotations

import threading
import time

from shoal.server.chain_view import ChainView
from shoal.server.protocol.hello import Channel


class Interruptions:
    """The longest of what waited between two epochs: a push, or a request sent again.

    A worker learns of a new epoch by the push after the one that had to wait, so the time belongs
    to the change that ends the interval.
    """

    def __init__(self, view: ChainView):
        self._view = view
        self._lock = threading.Lock()
        self._epoch = 0
        self._longest_s = 0.0
        self._broken_s: dict[Channel, float] = {}
        self._found_s: list[float] = []

    def begin(self) -> None:
        """The worker has joined."""
        self._epoch = self._view.epoch
        self._longest_s = 0.0
        self._broken_s.clear()

    def broken(self, channel: Channel) -> None:
        """A request was not answered, and is sent again."""
        self._broken_s.setdefault(channel, time.monotonic())

    def answered(self, channel: Channel, began_s: float, is_push: bool) -> None:
        since_s = self._broken_s.pop(channel, None)
        if is_push:
            since_s = began_s
        with self._lock:
            if since_s is not None:
                self._longest_s = max(self._longest_s, time.monotonic() - since_s)
            if is_push:
                self._close()

    def seconds(self) -> list[float]:
        """One for each change of the chain."""
        with self._lock:
            self._close()
            return list(self._found_s)

    def _close(self) -> None:
        if self._epoch != self._view.epoch:
            self._found_s.append(round(self._longest_s, 4))
            self._longest_s = 0.0
            self._epoch = self._view.epoch
