"""Workers that were away for a part of a run, in words and in its report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shoal.launch.here.output import Write
from shoal.launch.losses.lost_servers import LostServer, summarize_server_losses, without_service_s
from shoal.runtime.wording import listed

Away = Literal["lost", "returned", "joined"]


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
_NOT_SHOWN = ("away", "shares", "incarnation")  # in the report


@dataclass(frozen=True)
class LostWorker:
    """A worker that the others went on without, to the end or until it came (back)."""

    rank: int
    how: str = ""  # "was killed by SIGKILL"; empty for one that was not there at first
    after_s: float = 0.0  # when it was lost, since the start of the run
    lost_at: int | None = None  # the steps that it had done, if any
    away: Away = "lost"  # to the end; until it was started again; until it was asked for
    away_s: float | None = None  # until it took its place; None: it did not
    step: int | None = None  # the steps that had been done when it took its place
    came_too_late: bool = False  # the others had finished
    shares: SampleShares = SPLIT
    incarnation: int = 0  # of the process that was started later

    def in_words(self, steps: int = 0) -> str:
        """For the end of a run of so many steps."""
        missed, who = _missed(self.not_trained(steps)), f"worker {self.rank}"
        if self.away == "joined":
            if self.step is None:
                return f"{who} came too late to take part: the others had finished"
            at = f"{who} joined at step {self.shares.step_of(self.rank, self.step)}"
            return f"{at}; {missed} before" if missed else at
        if self.away == "returned" and self.away_s is None:
            return f"{who} {self.how} and was started again, and did not come back"
        text = f"{who} was lost before the first step"
        if self.lost_at is not None:
            text = f"{who} was lost at step {self.shares.step_of(self.rank, self.lost_at)}"
        if self.away == "returned":
            text += f" and came back after {self.away_s:.1f} s"
            return f"{text}; {missed}" if missed else f"{text}, at step {(self.step or 0) + 1}"
        if self.came_too_late:
            text += " and came back too late, when the others had finished"
        return f"{text}; {missed or 'the others trained its samples'}"

    def not_trained(self, steps: int = 0) -> float | None:
        """Steps that it has missed, in a run of so many; None: the others have trained them."""
        if self.away == "joined" and self.step is None:
            return None
        until = steps if self.away == "lost" else self.step or 0
        return self.shares.own_steps(until - (self.lost_at or 0))

    def document(self, steps: int = 0) -> dict[str, Any]:
        """For the report of a run of so many steps."""
        document = {name: value for name, value in asdict(self).items() if name not in _NOT_SHOWN}
        missed = self.not_trained(steps)
        return document | {"is_covered": self.shares.is_covered, "not_trained": missed}


def _missed(steps: float | None) -> str:
    if steps is None:
        return ""
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
    if not lost and not absent:
        return []
    steps = steps_of(reports)
    missing = sorted({worker.rank for worker in lost} | set(absent))
    finished = [rank for rank in range(workers) if rank not in missing]
    return [
        *(worker.in_words(steps) for worker in lost if steps),
        f"finished by {listed('worker', finished)}, without {listed('worker', missing)}",
    ]


@dataclass(frozen=True)
class RunResult:
    """A run that succeeded."""

    seconds: float
    lost: tuple[LostWorker, ...]
    reports: tuple[dict[str, Any] | None, ...]  # by rank; None for a worker without a report
    has_trained: bool = True  # a worker has come to the end of shoal.run
    returned: tuple[LostWorker, ...] = ()
    lost_servers: tuple[LostServer, ...] = ()
    servers_removed: int = 0  # from their chains, while they lived; they come back
    joined: tuple[LostWorker, ...] = ()
    absent: tuple[int, ...] = ()  # workers that took no part, and were not lost


def say_losses(result: RunResult, workers: int, write: Write) -> None:
    """What was lost, and what came back."""
    joined = [worker for worker in result.joined if not worker.came_too_late]  # those were named
    sentences = [worker.in_words() for worker in (*result.returned, *joined)]
    removed = result.servers_removed
    if result.lost_servers or removed:
        sentences.append(summarize_server_losses(result.lost_servers, removed, result.reports))
    sentences += losses_at_end(result.lost, workers, result.reports, result.absent)
    for sentence in sentences:
        write(f"shoal: {sentence}\n", True)


def run_report(strategy: str, workers: int, result: RunResult) -> dict[str, Any]:
    """The document that `shoal run --report` writes.

    `steps` is the largest number of steps of a worker, `seconds` the time of the run with its
    start. `samples_per_s` adds up all workers, each without the first fifth of its steps.
    `without_service_s` is how long the worker that waited longest got no service of a shard of
    servers with replicas. `ranks` holds the reports of the workers, null for one that was lost.
    """
    reports = [report for report in result.reports if report is not None]
    steps = steps_of(reports)
    rates = [r["samples_per_s"] for r in reports if isinstance(r.get("samples_per_s"), float)]
    return {
        "strategy": strategy,
        "workers": workers,
        "steps": steps,
        "seconds": result.seconds,
        "samples_per_s": sum(rates) if rates else None,
        "lost": [lost.document(steps) for lost in result.lost],
        "came_back": [back.document() for back in result.returned if back.away_s is not None],
        "joined": [joined.document() for joined in result.joined],
        "absent": list(result.absent),
        "servers_lost": [asdict(lost) for lost in result.lost_servers],
        "without_service_s": without_service_s(result.reports),
        "ranks": list(result.reports),
    }
