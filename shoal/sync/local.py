"""One replica alone: nothing to agree about."""

from __future__ import annotations

from shoal.replica.flat_params import FlatParams
from shoal.sync.base import Sync
from shoal.sync.optimizer_step import Update


class LocalUpdate(Sync):
    """Gradients stay where backward put them; no buckets, no copies."""

    def __init__(self, flat: FlatParams, update: Update):
        self.flat = flat
        self.update = update

    def finish(self) -> None:
        self.update.apply()
        self.flat.zero_grad()
