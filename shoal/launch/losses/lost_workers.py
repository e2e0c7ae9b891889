"""Which failures of workers a run survives.

A lost worker was killed by a signal, or gave up because it had lost its peers. A worker that
raises another error has met a mistake in the code or the data, which the others will meet too:
it ends the run, as does the loss of every worker.

The launcher notes every exit in the run directory, so that other processes can ask which workers
have exited (`RunDir.has_exited`).

Under some strategies the workers share memory that they create together at the start. There a
loss before all of them have joined is not survived, since the others would wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shoal.launch.here.output import Write
from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.failures import ProcessFailure, read_failure, when_lost
from shoal.launch.losses.lost_servers import LostServer, summarize_server_losses, without_service_s
from shoal.runtime import clock
from shoal.runtime.memory_limit import OutOfMemoryKills
from shoal.runtime.run_dir import RunDir, read
from shoal.runtime.wording import counted, listed, say
from shoal.strategy.base import Batches
from shoal.strategy.strategy import Strategy

Away = Literal["lost", "returned", "joined"]


@dataclass(frozen=True)
class SampleShares:
    """What becomes of the samples of a worker that is not there.

    `turns`: so many workers take whole batches in turns (hogwild); each of them trains one of so
    many steps, and its part of those that are left over at the end of an epoch.
    """

    is_covered: bool = False  # the others train them
    turns: int = 1

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
        missed = _missed(self.not_trained(steps))
        who = f"worker {self.rank}"
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
        """Steps that it has missed, in a run of so many; None: the others have trained them.

        A fraction is part of a batch.
        """
        if self.shares.is_covered or (self.away == "joined" and self.step is None):
            return None
        until = steps if self.away == "lost" else self.step or 0
        turns = self.shares.turns
        whole, left = divmod(max(0, until - (self.lost_at or 0)), turns)
        return whole + left / turns if left else whole

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


@dataclass(frozen=True)
class Tolerance:
    """Which workers a run can lose, and the strategy that allows it, for messages."""

    allowed_by: str
    needed: tuple[int, ...] = ()
    from_start: bool = True  # also before all workers have joined
    restarts: int = 0  # how often lost workers are started again, in all
    shares: SampleShares = SPLIT  # what becomes of the samples of a lost worker
    at_least: int = 1  # with fewer workers the run ends


def tolerance_of(
    strategy: Strategy,
    workers: int,
    restarts: int | None = None,
    start: int | None = None,
    at_least: int = 1,
) -> Tolerance | None:
    """None where the loss of any worker ends the run; `start`: so many are there at first."""
    takes_back = bool(restarts) or start is not None
    if takes_back:
        strategy.require_takes_back()
        restarts = restarts if strategy.takes_back else 0
    if not strategy.survives_loss:
        return None
    needed = tuple(r for r in range(workers) if strategy.needs(r))
    from_start = strategy.starts_apart or takes_back
    in_turns = strategy.sync is not None and strategy.sync.batches is Batches.IN_TURNS
    shares = SampleShares(strategy.is_elastic, workers if in_turns else 1)
    return Tolerance(str(strategy), needed, from_start, restarts or 0, shares, at_least)


def taking_back(strategy: Strategy, workers: int) -> Strategy:
    """The strategy of a run that takes lost workers back; says so where it differs."""
    chosen = strategy.taking_back(workers)
    if chosen != strategy:
        why = "a step waits for the workers that are there, so that one that was lost can return"
        say(f"{strategy} runs as {chosen}: {why}")
    return chosen


class LossPolicy:
    """Decides for each worker that has exited whether the run continues."""

    def __init__(
        self,
        run_dir: RunDir,
        workers: int,
        tolerance: Tolerance | None,
        say: Callable[[str], None],
        is_planned: Callable[[ProcessExit], bool] = lambda exit: False,
    ):
        """`is_planned(exit)`: it was to be killed, and not by the kernel for its memory."""
        self._run_dir = run_dir
        self._workers = workers
        self._tolerance = tolerance
        self._say = say
        self._start_ns = clock.monotonic_ns()
        self._started_ns: dict[int, int] = {}  # of those that were started again
        self._to_restart: LostWorker | None = None
        self._has_succeeded = False
        self._later: list[LostWorker] = []  # those that were started again, or asked for
        self._absent: set[int] = set()  # those that were not started, or came too late
        self._shares = SPLIT if tolerance is None else tolerance.shares
        self._is_planned = is_planned
        self._memory_kills = OutOfMemoryKills()
        self.lost: list[LostWorker] = []
        self.too_few: str | None = None  # why the run ends: a sentence
        self.restart_s = 0.0  # from a loss to the start of the next process

    def memory_ran_out(self, exit: ProcessExit) -> bool:
        """Whether this may be why a process was killed."""
        return not self._is_planned(exit) and self._memory_kills.has_struck()

    def restarts(self, exit: ProcessExit) -> bool:
        """Whether a worker whose loss the run survives is started again now."""
        lost = self._to_restart
        self._to_restart = None
        if lost is None or lost.rank != exit.rank:
            return False
        self._start_later(replace(lost, away="returned"))
        self._started_ns[exit.rank] = clock.monotonic_ns() + round(1e9 * self.restart_s)
        return True

    def _start_later(self, worker: LostWorker) -> None:
        incarnation = self._run_dir.incarnation(worker.rank) + 1
        self._run_dir.note_start(worker.rank, incarnation)
        self._later.append(replace(worker, incarnation=incarnation))

    def note_absent(self, rank: int) -> None:
        """This worker is not started at first; the others do not wait for it."""
        self._run_dir.note_exit(rank, 0)
        self._absent.add(rank)

    @property
    def absent(self) -> tuple[int, ...]:
        """The workers that took no part, and were not lost."""
        return tuple(sorted(self._absent - {lost.rank for lost in self.lost}))

    def join(self, request: str) -> int | None:
        """Answer a request: the worker that is not there and is started now; None: all are."""
        ranks = [rank for rank in range(self._workers) if self._run_dir.has_exited(rank)]
        if not ranks or self._is_ending(ranks):
            all_there = "all workers are there" if self._workers > 1 else "its only worker is there"
            why = "the first workers have finished" if ranks else all_there
            self._say(f"a worker was asked for, and none is started: {why}")
            self._run_dir.answer_join(request, f"no worker is started: {why}")
            return None
        rank = ranks[0]
        lost = [lost for lost in self.lost if lost.rank == rank] or [LostWorker(rank)]
        self._start_later(replace(lost[0], away="joined", shares=self._shares))
        self._absent.discard(rank)
        self.lost = [lost for lost in self.lost if lost.rank != rank]
        started = f"worker {rank} of {self._workers} is started"
        self._say(f"{started}, as it was asked for")
        self._run_dir.answer_join(request, started, rank)
        return rank

    def _is_ending(self, exited: Sequence[int]) -> bool:
        """Whether one that comes now would come too late: a worker has finished its training."""
        left = [rank for rank in range(self._workers) if rank not in exited]
        return self._has_succeeded or any(map(self._run_dir.has_ended_training, left))

    def returned(self) -> list[LostWorker]:
        """The workers that were started again, as far as they came back."""
        return [self._completed(worker) for worker in self._later if worker.away == "returned"]

    def joined(self) -> list[LostWorker]:
        """The workers that were asked for and took part, or came too late for it."""
        found = [self._completed(worker) for worker in self._later if worker.away == "joined"]
        return [worker for worker in found if worker.step is not None or worker.came_too_late]

    def _completed(self, worker: LostWorker) -> LostWorker:
        """With what it has written when it took its place."""
        worker = replace(worker, lost_at=None)
        document = read(self._run_dir.back(worker.rank, worker.incarnation))
        if document is None:
            return worker
        lost_at = document["lost_at"]
        step = document["step"]
        away_s = self._seconds(document["time_ns"]) - worker.after_s
        was_there = lost_at > 0 or (worker.away == "returned" and step > 0)
        return replace(worker, away_s=away_s, lost_at=lost_at if was_there else None, step=step)

    def survives(self, exit: ProcessExit) -> bool:
        """Note the exit of a worker; False when it ends the run."""
        self._run_dir.note_exit(exit.rank, exit.returncode)
        if exit.returncode == 0:
            self._has_succeeded = True
            if self._run_dir.late(exit.rank, self._run_dir.incarnation(exit.rank)).exists():
                self._note_late(exit.rank)
            return True
        tolerance = self._tolerance
        if tolerance is None or exit.rank in tolerance.needed:
            return False
        if not tolerance.from_start and not self._run_dir.all_joined.exists():
            return False
        report = read_failure(self._run_dir, exit.rank)
        struck = self.memory_ran_out(exit)
        failure = ProcessFailure(
            exit.rank, exit.returncode, exit.noticed_ns, report, out_of_memory=struck
        )
        if failure.is_loss:
            self._note_loss(failure, tolerance)
        return failure.is_loss and self.too_few is None

    def _note_loss(self, failure: ProcessFailure, tolerance: Tolerance) -> None:
        rank = failure.rank
        how = failure.ending if failure.returncode < 0 else "gave up, having lost its peers,"
        after_s = self._seconds(failure.noticed_ns)
        lost = LostWorker(rank, how, after_s, self._run_dir.steps_done(rank), shares=self._shares)
        started_ns = self._started_ns.get(rank, self._start_ns)
        age_s = (failure.noticed_ns - started_ns) / 1e9
        line = f"worker {rank} {how} {when_lost(age_s, started_ns != self._start_ns)}"
        count = sum(worker.away == "returned" for worker in self._later) + 1
        if count <= tolerance.restarts and not self._has_succeeded:
            self._to_restart = lost
            self._say(f"{line}; it is started again ({count} of {tolerance.restarts})")
            return
        self.lost.append(lost)
        left = sum(not self._run_dir.has_exited(rank) for rank in range(self._workers))
        if left < tolerance.at_least > 1 and not self._has_succeeded:
            there = f"{counted(left, 'worker is', 'workers are')} left"
            self.too_few = f"{line}, and {there}, fewer than the {tolerance.at_least} of --elastic"
        elif len(self.lost) < self._workers:
            self._say(f"{line}; the others go on, as {tolerance.allowed_by} allows")

    def _note_late(self, rank: int) -> None:
        """A worker that was started later has found that the others had finished."""
        at = (rank, self._run_dir.incarnation(rank))
        for worker in [worker for worker in self._later if (worker.rank, worker.incarnation) == at]:
            self._later.remove(worker)
            late = replace(worker, came_too_late=True)
            if worker.how:  # it was lost before
                self.lost.append(replace(late, away="lost"))
                continue
            self._later.append(late)
            self._absent.add(rank)
            self._say(late.in_words())

    def _seconds(self, time_ns: int) -> float:
        return (time_ns - self._start_ns) / 1e9
