"""The plan of `ps`: workers of a model whose weights live on servers."""

from __future__ import annotations

from shoal.strategy.terms import Ps
from shoal.sync.base import Replica, StepSettings, Sync, SyncPlan
from shoal.sync.compressed_sum import refuse_scaled
from shoal.sync.ps.connect import join_servers
from shoal.sync.registry import runs


@runs(Ps)
class PsPlan(SyncPlan[Ps]):
    @property
    def can_be_exact(self) -> bool:
        return self.term.compress is None

    def check(self, options: StepSettings, replicas: int) -> None:
        super().check(options, replicas)
        if self.term.compress is not None:
            refuse_scaled(self.term, options)

    def build(self, replica: Replica) -> Sync:
        return join_servers(self.term, replica)
