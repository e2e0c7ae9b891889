"""Workers that a run lost, and those that came back, in words and in its report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SampleShares:
    """What becomes of the samples of a worker that is not there.

    `turns`: so many workers take whole batches in turns (hogwild); each of them trains one of so
    many steps, and its part of those that are left over at the end of an epoch.
    """

    is_covered: bool = False  # the others train them
    turns: int = 1

    def own_steps(self, steps: int) -> float | None:
        """How many of so many steps a worker that was away has not trained; None: the others have.

        A fraction is part of a batch.
        """
        if self.is_covered:
            return None
        whole, left = divmod(max(0, steps), self.turns)
        return whole + left / self.turns if left else whole

    def step_of(self, rank: int, done: int) -> int:
        """The number of the step that a worker does after so many steps of the run."""
        return done + 1 + (rank if self.turns > 1 else 0)


SPLIT = SampleShares()


@dataclass(frozen=True)
class LostWorker:
    """A worker that the run continued without."""

    rank: int
    how: str  # "was killed by SIGKILL"
    after_s: float  # since the start of the run
    lost_at: int | None = None  # the steps that it had done, if any
    came_too_late: bool = False  # it was started again, and the others had finished
    shares: SampleShares = SPLIT

    def at_end(self, steps: int) -> str:
        """For the end of a run of so many steps."""
        late = " and came back too late, when the others had finished" * self.came_too_late
        missed = _not_trained(self.not_trained(steps), "the others trained its samples")
        return f"worker {self.rank} was lost {_where(self)}{late}; {missed}"

    def not_trained(self, steps: int) -> float | None:
        return self.shares.own_steps(steps - (self.lost_at or 0))

    def document(self, steps: int) -> dict[str, Any]:
        """For the report of a run of so many steps."""
        return _document(self, self.not_trained(steps))


@dataclass(frozen=True)
class ReturnedWorker:
    """A worker that was lost and started again."""

    rank: int
    how: str
    after_s: float  # when it was lost, since the start of the run
    away_s: float | None = None  # until it took its place; None: it did not
    lost_at: int | None = None  # the steps that it had done, if any
    step: int = 0  # the steps that had been done when it went on
    shares: SampleShares = SPLIT

    def __str__(self) -> str:
        if self.away_s is None:
            return f"worker {self.rank} {self.how} and was started again, and did not come back"
        back = f"was lost {_where(self)} and came back after {self.away_s:.1f} s"
        if self.shares.is_covered:
            return f"worker {self.rank} {back}, at step {self.step + 1}"
        return f"worker {self.rank} {back}; {_not_trained(self.not_trained)}"

    @property
    def not_trained(self) -> float | None:
        return self.shares.own_steps(self.step - (self.lost_at or 0))

    def document(self) -> dict[str, Any]:
        return _document(self, self.not_trained)


@dataclass(frozen=True)
class JoinedWorker:
    """A worker that came after the start (`shoal join`)."""

    rank: int
    step: int | None  # the steps that had been done before; None: it did not take part
    lost_at: int | None = None  # of these it had done so many, before it was lost
    came_too_late: bool = False  # the others had finished
    shares: SampleShares = SPLIT

    def __str__(self) -> str:
        if self.step is None:
            return f"worker {self.rank} came too late to take part: the others had finished"
        joined = f"worker {self.rank} joined at step {self.shares.step_of(self.rank, self.step)}"
        if self.shares.is_covered:
            return joined
        return f"{joined}; {_not_trained(self.not_trained)} before"

    @property
    def not_trained(self) -> float | None:
        return None if self.step is None else self.shares.own_steps(self.step - (self.lost_at or 0))

    def document(self) -> dict[str, Any]:
        return _document(self, self.not_trained)


def _document(
    worker: LostWorker | ReturnedWorker | JoinedWorker, missed: float | None
) -> dict[str, Any]:
    document = {name: value for name, value in asdict(worker).items() if name != "shares"}
    return document | {"is_covered": worker.shares.is_covered, "not_trained": missed}


def _where(worker: LostWorker | ReturnedWorker) -> str:
    if worker.lost_at is None:
        return "before the first step"
    return f"at step {worker.shares.step_of(worker.rank, worker.lost_at)}"


def _not_trained(steps: float | None, covered: str = "") -> str:
    if steps is None:
        return covered
    number = f"{steps:.1f}".removesuffix(".0")
    return f"{number} step{'s' * (number != '1')} {'was' if number == '1' else 'were'} not trained"


def steps_of(reports: Sequence[dict[str, Any] | None]) -> int:
    """The largest number of steps of a worker."""
    steps = [(report or {}).get("steps") for report in reports]
    return max((number for number in steps if isinstance(number, int)), default=0)


def losses_at_end(
    lost: Sequence[LostWorker],
    workers: int,
    reports: Sequence[dict[str, Any] | None],
    absent: Collection[int] = (),
) -> list[str]:
    """For the end of a run that succeeded: what the lost workers had not trained, and who finished.

    `absent` workers took no part. Where workers do not count their steps, lost ones are only named.
    """
    steps = steps_of(reports)
    sentences = [worker.at_end(steps) for worker in lost if steps]
    return [*sentences, summarize_losses(lost, workers, absent)] if lost or absent else []


def summarize_losses(lost: Sequence[LostWorker], workers: int, absent: Collection[int] = ()) -> str:
    """Which workers finished and which did not."""
    missing = sorted({worker.rank for worker in lost} | set(absent))
    finished = [rank for rank in range(workers) if rank not in missing]
    return f"finished by {_list('worker', finished)}, without {_list('worker', missing)}"


def _list(role: str, ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    return f"{role}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
