"""One replica, which agrees with no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.errors import StrategyError
from shoal.strategy.base import SyncTerm


@dataclass(frozen=True)
class Single(SyncTerm):
    """One replica: there is nothing to agree on."""

    compared: ClassVar[tuple[str, ...]] = ()  # always, as the reference

    sync_module: ClassVar[str] = "shoal.sync.local"

    communicates = False

    def check(self, replicas: int) -> None:
        if replicas > 1:
            raise StrategyError(
                f"single runs on one worker, and there are {replicas}: did you mean ddp?"
            )
