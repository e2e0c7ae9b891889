"""Which replica of a shard is the head, as the launcher says after a loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shoal.coordinator.alive import Alive, alive_key
from shoal.coordinator.interface import Compacted, Coordinator
from shoal.launch.lost_servers import Replication
from shoal.server.chain.config import ChainConfig

_WATCH_S = 1.0
_ELECTION_S = 10.0  # how long the launcher waits for a head


class ChainHeads:
    """The heads that are known: replica 0 of each shard at the start."""

    def __init__(self, replication: Replication, say: Callable[[str], None]):
        self._replication = replication
        self._say = say
        self._known: dict[int, int] = {}
        self._saying = threading.Lock()

    def say_head(self, coordinator: Coordinator, server: int) -> None:
        """Wait until the shard of a server that was lost has a head, and say which, if it is new.

        CoordinatorError where the coordinator does not answer.
        """
        shard = server // self._replication.replicas
        deadline_s = time.monotonic() + _ELECTION_S
        while time.monotonic() < deadline_s:
            revision = coordinator.list("chain/").revision
            head = self._live_head(coordinator, shard)
            if head is not None:
                self._say_new(shard, head)
                return
            with suppress(Compacted):
                coordinator.watch("chain/", revision, _WATCH_S)

    def _live_head(self, coordinator: Coordinator, shard: int) -> int | None:
        """The head of the chain, if it is the process that has its key."""
        stored = coordinator.get(f"chain/{shard}")
        if stored is None:
            return None
        with suppress(msgspec.MsgspecError):
            config = msgspec.msgpack.decode(stored.value, type=ChainConfig)
            head = config.head
            key = alive_key(shard * self._replication.replicas + (head or 0))
            alive = coordinator.get(key)
            if head is None or alive is None:
                return None
            incarnation = msgspec.msgpack.decode(alive.value, type=Alive).incarnation
            return head if config.has(head, incarnation) else None
        return None

    def _say_new(self, shard: int, head: int) -> None:
        with self._saying:
            if self._known.get(shard, 0) == head:
                return
            self._known[shard] = head
            server = shard * self._replication.replicas + head
            self._say(f"{self._replication.in_words(server)} is the head of shard {shard} now")
