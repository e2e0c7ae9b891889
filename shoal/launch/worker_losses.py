"""Workers that a run lost, and those that came back, in words and in its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LostWorker:
    """A worker that the run continued without."""

    rank: int
    how: str  # "was killed by SIGKILL"
    after_s: float  # since the start of the run
    lost_at: int | None = None  # the steps that it had done, if any
    came_too_late: bool = False  # it was started again, and the others had finished
    is_covered: bool = False  # the others have trained its samples

    def at_end(self, steps: int) -> str:
        """For the end of a run of so many steps."""
        late = " and came back too late, when the others had finished" * self.came_too_late
        if self.is_covered:
            covered = "the others trained its samples"
            return f"worker {self.rank} was lost {_where(self.lost_at)}{late}; {covered}"
        missed = _not_trained(max(0, steps - (self.lost_at or 0)))
        return f"worker {self.rank} was lost {_where(self.lost_at)}{late}; {missed}"


@dataclass(frozen=True)
class ReturnedWorker:
    """A worker that was lost and started again."""

    rank: int
    how: str
    after_s: float  # when it was lost, since the start of the run
    away_s: float | None = None  # until it took its place; None: it did not
    lost_at: int = 0  # the step that it had come to
    step: int = 0  # the one that it went on with
    is_covered: bool = False  # the others have trained its samples meanwhile

    def __str__(self) -> str:
        if self.away_s is None:
            return f"worker {self.rank} {self.how} and was started again, and did not come back"
        where = _where(self.lost_at if self.step else None)
        if self.is_covered:
            back = f"came back after {self.away_s:.1f} s, at step {self.step + 1}"
            return f"worker {self.rank} was lost {where} and {back}"
        missed = _not_trained(self.step - self.lost_at)
        return (
            f"worker {self.rank} was lost {where} and came back after {self.away_s:.1f} s; {missed}"
        )


@dataclass(frozen=True)
class JoinedWorker:
    """A worker that came after the start (`shoal join`)."""

    rank: int
    step: int  # the steps that had been done before

    def __str__(self) -> str:
        return f"worker {self.rank} joined at step {self.step + 1}"


def _where(lost_at: int | None) -> str:
    return "before the first step" if lost_at is None else f"at step {lost_at + 1}"


def _not_trained(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)} {'was' if steps == 1 else 'were'} not trained"


def steps_of(reports: Sequence[dict[str, Any] | None]) -> int:
    """The largest number of steps of a worker."""
    steps = [(report or {}).get("steps") for report in reports]
    return max((number for number in steps if isinstance(number, int)), default=0)


def losses_at_end(
    lost: Sequence[LostWorker], workers: int, reports: Sequence[dict[str, Any] | None]
) -> list[str]:
    """For the end of a run that succeeded: what the lost workers had not trained, and who finished.

    A worker that does not count its steps is only named.
    """
    steps = steps_of(reports)
    known = [worker for worker in lost if worker.lost_at is not None or worker.came_too_late]
    sentences = [worker.at_end(steps) for worker in known if steps]
    return [*sentences, summarize_losses(lost, workers)] if lost else []


def summarize_losses(lost: Sequence[LostWorker], workers: int) -> str:
    """Which workers finished and which did not."""
    missing = sorted(worker.rank for worker in lost)
    finished = [rank for rank in range(workers) if rank not in missing]
    return f"finished by {_list('worker', finished)}, without {_list('worker', missing)}"


def _list(role: str, ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    return f"{role}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
