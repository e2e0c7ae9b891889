"""Workers that are lost on the way, where the strategy lets the others go on.

A loss is a worker that was killed by a signal, or that gave up because it had lost its peers.
A worker that raises anything else has met a mistake in the code or the data, which the others
will meet too: it ends the run, as does the loss of every worker.

The launcher notes every end in the run directory, so that others can ask who is gone
(`group/gone.py`).

Under some strategies workers share what they have made together at the start. Who is lost before
they have met (`met`) is not survived there, since the others would wait for it in vain.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.failures import Death, read_report, signal_name
from shoal.launch.processes import Exit
from shoal.runtime.gone import note_of
from shoal.strategy.strategy import Strategy


@dataclass(frozen=True)
class Tolerance:
    """Which workers a run can lose, and what allows it, for the person who reads it."""

    allowed_by: str
    needed: tuple[int, ...] = ()
    from_start: bool = True  # also those that are lost before the workers have met


def tolerance_of(strategy: Strategy, workers: int) -> Tolerance | None:
    """None where the loss of any worker ends the run."""
    if not strategy.survives_loss:
        return None
    needed = tuple(r for r in range(workers) if strategy.needs(r))
    return Tolerance(str(strategy), needed, strategy.starts_apart)


@dataclass(frozen=True)
class Loss:
    """A worker that the others went on without."""

    rank: int
    how: str  # "was killed by SIGKILL"
    after_s: float  # since the run began

    def __str__(self) -> str:
        return f"worker {self.rank} {self.how} after {self.after_s:.1f} s"


class Losses:
    """Decides for each worker that has ended whether the others go on, and tells them."""

    def __init__(
        self,
        run_dir: Path,
        workers: int,
        tolerance: Tolerance | None,
        say: Callable[[str], None],
    ):
        self._run_dir = run_dir
        self._workers = workers
        self._tolerance = tolerance
        self._say = say
        self._start_ns = time.monotonic_ns()
        self.lost: list[Loss] = []

    def take(self, exit: Exit) -> bool:
        """Note the end of a worker; True when it is no reason to end the run."""
        note_end(self._run_dir, exit.rank, exit.returncode)
        if self._tolerance is None:
            return exit.returncode == 0
        death = Death(
            exit.rank, exit.returncode, exit.noticed_ns, read_report(self._run_dir, exit.rank)
        )
        survived = exit.returncode == 0
        if not survived and death.is_loss and self._can_be_missed(exit.rank):
            loss = Loss(exit.rank, _how(death), (exit.noticed_ns - self._start_ns) / 1e9)
            self.lost.append(loss)
            if len(self.lost) < self._workers:
                self._say(f"{loss}; the others go on, as {self._tolerance.allowed_by} allows")
            survived = True
        return survived

    def _can_be_missed(self, rank: int) -> bool:
        assert self._tolerance is not None
        in_time = self._tolerance.from_start or have_met(self._run_dir)
        return in_time and rank not in self._tolerance.needed


def who_finished(lost: Sequence[Loss], workers: int) -> str:
    """At the end of a run that went well: who is missing."""
    missing = sorted(loss.rank for loss in lost)
    finished = [rank for rank in range(workers) if rank not in missing]
    return f"finished by {named('worker', finished)}, without {named('worker', missing)}"


def note_end(run_dir: Path, rank: int, returncode: int) -> None:
    """Leave word that a worker's process has ended; there as a whole or not at all."""
    path = note_of(run_dir, rank)
    part = path.with_suffix(".part")
    name = signal_name(-returncode) if returncode < 0 else None
    document = {"rank": rank, "returncode": returncode, "signal": name}
    part.write_text(json.dumps({**document, "time_ns": time.monotonic_ns()}), encoding="utf-8")
    os.replace(part, path)


def note_meeting(run_dir: str | Path) -> None:
    """Leave word that all workers have come."""
    (Path(run_dir) / "met").touch()


def have_met(run_dir: str | Path) -> bool:
    return (Path(run_dir) / "met").exists()


def named(role: str, ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    return f"{role}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _how(death: Death) -> str:
    if death.returncode < 0:
        return f"was killed by {signal_name(-death.returncode)}"
    return "gave up, having lost its peers,"
