"""How servers are started and copied."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shoal.strategy.strategy import Strategy

SERVER_RESTARTS = 3  # of each server


@dataclass(frozen=True)
class Replication:
    """How servers are copied: server p is replica p % replicas of shard p // replicas."""

    replicas: int = 1
    consistency: str = "strong"
    restarts: int = SERVER_RESTARTS

    @property
    def is_on(self) -> bool:
        return self.replicas > 1

    def in_words(self, server: int) -> str:
        if not self.is_on:
            return f"server {server}"
        shard, replica = divmod(server, self.replicas)
        return f"server {server} (shard {shard}, replica {replica})"


SINGLE_COPY = Replication()


def replication_of(strategy: Strategy, workers: int, restarts: int | None = None) -> Replication:
    """`restarts` of each server; None: as often as is usual."""
    sync = strategy.sync_for(workers)
    times = SERVER_RESTARTS if restarts is None else restarts
    return Replication(sync.server_replicas, sync.server_consistency, times)


SERVER_COMMAND = (sys.executable, "-m", "shoal.server.main")
