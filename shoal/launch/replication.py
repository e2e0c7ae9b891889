"""How the servers of a run are copied."""

from __future__ import annotations

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

    def shard_of(self, server: int) -> int:
        return server // self.replicas

    def server_of(self, shard: int, replica: int) -> int:
        return shard * self.replicas + replica

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
