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

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.failures import ProcessFailure, read_failure, when_lost
from shoal.launch.losses.loss_report import SPLIT, LostWorker, SampleShares
from shoal.runtime.memory_limit import OutOfMemoryKills
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted, say
from shoal.strategy.base import Batches
from shoal.strategy.strategy import Strategy


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
    ):
        self._run_dir = run_dir
        self._workers = workers
        self._tolerance = tolerance
        self._say = say
        self._start_ns = time.monotonic_ns()
        self._started_ns: dict[int, int] = {}  # of those that were started again
        self._to_restart: LostWorker | None = None
        self._has_succeeded = False
        self._later: list[LostWorker] = []  # those that were started again, or asked for
        self._absent: set[int] = set()  # those that were not started, or came too late
        self._shares = SPLIT if tolerance is None else tolerance.shares
        self.memory_kills = OutOfMemoryKills()
        self.lost: list[LostWorker] = []
        self.too_few: str | None = None  # why the run ends: a sentence

    def restarts(self, exit: ProcessExit) -> bool:
        """Whether a worker whose loss the run survives is started again now."""
        lost, self._to_restart = self._to_restart, None
        if lost is None or lost.rank != exit.rank:
            return False
        self._start_later(replace(lost, away="returned"))
        self._started_ns[exit.rank] = time.monotonic_ns()
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
        document = self._run_dir.read_return(worker.rank, worker.incarnation)
        if document is None:
            return worker
        lost_at, step = document["lost_at"], document["step"]
        away_s = self._seconds(document["time_ns"]) - worker.after_s
        was_there = lost_at > 0 or (worker.away == "returned" and step > 0)
        return replace(worker, away_s=away_s, lost_at=lost_at if was_there else None, step=step)

    def survives(self, exit: ProcessExit) -> bool:
        """Note the exit of a worker; False when it ends the run."""
        self._run_dir.note_exit(exit.rank, exit.returncode)
        if exit.returncode == 0:
            self._has_succeeded = True
            if self._run_dir.came_too_late(exit.rank):
                self._note_late(exit.rank)
            return True
        tolerance = self._tolerance
        if tolerance is None or exit.rank in tolerance.needed:
            return False
        if not tolerance.from_start and not self._run_dir.all_joined.exists():
            return False
        report = read_failure(self._run_dir, exit.rank)
        struck = self.memory_kills.has_struck()
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
