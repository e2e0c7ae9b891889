"""Which replica of which shard a server is."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.server.chain.state import ChainConsistency


@dataclass(frozen=True)
class ReplicaPlace:
    """process = shard * replicas + replica."""

    shard: int
    replica: int
    replicas: int
    consistency: ChainConsistency = "strong"

    @property
    def process(self) -> int:
        return self.shard * self.replicas + self.replica

    def in_words(self) -> str:
        return f"server {self.process} (shard {self.shard}, replica {self.replica})"

    def other_in_words(self, replica: int) -> str:
        """Another replica of the same shard."""
        return ReplicaPlace(self.shard, replica, self.replicas).in_words()
