"""Terms that say how one replica is split over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from shoal.schedules import user
from shoal.strategy.base import Term
from shoal.strategy.options import FLAG, NAMES, PLAN, SCHEDULE, one_of, optional, positive, whole


@dataclass(frozen=True, kw_only=True)
class Tp(Term, role="tp"):
    """Tensor parallelism: matrices are split by column or row over `size` workers."""

    compared: ClassVar[tuple[str, ...]] = ("tp(2)",)

    size: Annotated[int, whole(1)] = field(kw_only=False)
    plan: Annotated[Mapping[str, str] | None, optional(PLAN)] = field(default=None, hash=False)
    sequence: Annotated[bool, FLAG] = False


@dataclass(frozen=True, kw_only=True)
class Ep(Term, role="ep"):
    """Expert parallelism: the experts of a mixture live on `size` workers, and tokens travel.

    `capacity` bounds the tokens that an expert takes, as a multiple of an even share; what is
    above it is dropped. `experts` names lists of experts that are not found by themselves.
    """

    compared: ClassVar[tuple[str, ...]] = ()

    size: Annotated[int, whole(1)] = field(kw_only=False)
    capacity: Annotated[float | None, optional(positive(1000))] = None
    experts: Annotated[Sequence[str] | None, optional(NAMES)] = None


@dataclass(frozen=True, kw_only=True)
class Cp(Term, role="cp"):
    """Context parallelism: every worker has some positions of each sequence."""

    compared: ClassVar[tuple[str, ...]] = ()

    size: Annotated[int, whole(1)] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class Pp(Term, role="pp"):
    """Pipeline parallelism: layers are cut into stages over `size` workers."""

    compared: ClassVar[tuple[str, ...]] = ("pp(2)",)

    size: Annotated[int, whole(1)] = field(kw_only=False)
    schedule: Annotated[str, SCHEDULE] = "1f1b"
    microbatches: Annotated[int | None, optional(whole(1))] = None
    chunks: Annotated[int | None, optional(whole(1))] = None
    recompute: Annotated[bool, FLAG] = False
    cuts: Annotated[Sequence[str] | None, optional(NAMES)] = None
    balance: Annotated[str, one_of("weights", "measured")] = "weights"

    def check(self) -> None:
        """Refuse a user's schedule that is wrong, as far as its micro-batches are known."""
        if not user.is_user_function(self.schedule):
            return
        if self.microbatches is None:
            user.load_function(self.schedule)
        else:
            from shoal.schedules.pipelines.catalog import proven_pipeline

            proven_pipeline(self.schedule, self.size, self.microbatches, self.chunks)
