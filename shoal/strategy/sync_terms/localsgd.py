"""Local SGD and DiLoCo: replicas average after several steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shoal.strategy.base import ElasticOption
from shoal.strategy.options import COMPRESS, FLAG, OUTER, optional, outer_settings, whole


@dataclass(frozen=True, kw_only=True)
class Localsgd(ElasticOption):
    """Replicas train alone for `every` steps, then average or take an outer step."""

    compared: ClassVar[tuple[str, ...]] = (
        "localsgd(every=8)",
        'localsgd(every=8, outer="nesterov(lr=0.7)")',
    )

    every: Annotated[int, whole(1)] = 16
    outer: Annotated[str | None, optional(OUTER)] = None
    compress: Annotated[str | None, optional(COMPRESS)] = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two averages

    @property
    def meets_every(self) -> int:
        return self.every

    @property
    def lockstep(self) -> bool:
        return self.every == 1

    @property
    def equals_single(self) -> bool:
        """For plain SGD: momentum and weight decay are linear in the gradient, Adam is not."""
        return self.every == 1 and self.outer is None and self.compress is None

    def _check_options(self) -> None:
        if self.outer is not None:
            outer_settings(self.outer)
        self.refuse_compression()
