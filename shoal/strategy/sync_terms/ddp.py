"""Data parallelism: gradients are added up with an all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.errors import StrategyError
from shoal.schedules import user
from shoal.strategy.base import ElasticOption
from shoal.strategy.options import ALGORITHM, COMPRESS, FLAG, MAX_NUMBER, optional, positive


@dataclass(frozen=True, kw_only=True)
class Ddp(ElasticOption):
    """Replicas add up their gradients with an all-reduce, bucket by bucket."""

    compared: ClassVar[tuple[str, ...]] = (
        "ddp",
        'ddp(algorithm="ring")',
        'ddp(compress="int8")',
        'ddp(compress="powersgd(rank=4)")',
    )

    algorithm: Annotated[str, ALGORITHM] = "auto"
    bucket_mb: Annotated[float, positive(MAX_NUMBER)] = 25
    compress: Annotated[str | None, optional(COMPRESS)] = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two steps

    def _check_options(self) -> None:
        self.refuse_compression()
        if self.elastic and self.algorithm != "auto":
            raise StrategyError(
                f"ddp(elastic=True) takes no algorithm, and {self.algorithm!r} is given: its group "
                "is one of shared memory, which has its own"
            )

    @property
    def equals_single(self) -> bool:
        return self.compress is None

    is_exact_at_any_number = True

    @property
    def collective_algorithm(self) -> str | None:
        return None if self.algorithm == "auto" else self.algorithm

    def check(self, replicas: int) -> None:
        if replicas > 1 and user.is_user_function(self.algorithm):
            from shoal.schedules.user_proof import proven_collective

            proven_collective(self.algorithm, "all_reduce", replicas)
