"""ZeRO: replicas shard optimizer state, gradients and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from shoal.errors import StrategyError
from shoal.strategy.base import ElasticOption
from shoal.strategy.options import FLAG, one_of, whole


@dataclass(frozen=True)
class Zero(ElasticOption):
    """Replicas shard optimizer state (1), gradients too (2), parameters too (3)."""

    compared: ClassVar[tuple[str, ...]] = ("zero(1)", "zero(2)", "zero(3)")

    stage: Annotated[int, one_of(1, 2, 3)] = 1
    elastic: Annotated[bool, FLAG] = field(default=False, kw_only=True)  # workers leave and join
    copies: Annotated[int, whole(1)] = field(default=1, kw_only=True)  # of each shard, if elastic

    def _check_options(self) -> None:
        if not self.elastic and self.copies != 1:
            raise StrategyError(
                f"zero: copies={self.copies} is for elastic=True: without it no worker holds a "
                "copy of the shard of another one"
            )

    shards_state = True

    @property
    def shard_copies(self) -> int:
        """On how many other workers a shard is."""
        return self.copies if self.elastic else 0

    def with_whole_parameters(self) -> Zero:
        return replace(self, stage=min(self.stage, 2))

    @property
    def is_exact_at_any_number(self) -> bool:
        return self.elastic

    @property
    def why_not_back(self) -> str | None:
        return None if self.elastic else f"its workers stay the same: take {self.as_elastic()}"
