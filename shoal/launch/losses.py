"""Workers that are lost on the way, where the strategy lets the others go on.

A loss is a worker that was killed by a signal, or that gave up because it had lost its peers.
A worker that raises anything else has met a mistake in the code or the data, which the others
will meet too: it ends the run, as does the loss of every worker.

The launcher notes every end in the run directory, so that workers can ask who is gone. A note is
written after the process has ended: whatever a worker had to say is there by then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.crew import Exit
from shoal.launch.failures import Death, read_report, signal_name
from shoal.strategy import Strategy


@dataclass(frozen=True)
class Tolerance:
    """Which workers a run can lose, and what allows it, for the person who reads it."""

    allowed_by: str
    needed: tuple[int, ...] = ()


def tolerance_of(strategy: Strategy, workers: int) -> Tolerance | None:
    """None where the loss of any worker ends the run."""
    if not strategy.survives_loss:
        return None
    return Tolerance(str(strategy), tuple(r for r in range(workers) if strategy.needs(r)))


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
        self._run_dir, self._workers = run_dir, workers
        self._tolerance, self._say = tolerance, say
        self._start_ns = time.monotonic_ns()
        self.lost: list[Loss] = []

    def take(self, exit: Exit) -> bool:
        """Note the end of a worker; True when it is no reason to end the run."""
        if self._tolerance is None:
            return exit.returncode == 0
        death = Death(
            exit.rank, exit.returncode, exit.noticed_ns, read_report(self._run_dir, exit.rank)
        )
        survived = exit.returncode == 0
        if not survived and death.is_loss and exit.rank not in self._tolerance.needed:
            loss = Loss(exit.rank, _how(death), (exit.noticed_ns - self._start_ns) / 1e9)
            self.lost.append(loss)
            if len(self.lost) < self._workers:
                self._say(f"{loss}; the others go on, as {self._tolerance.allowed_by} allows")
            survived = True
        note_end(self._run_dir, exit.rank, exit.returncode)
        return survived


def who_finished(lost: Sequence[Loss], workers: int) -> str:
    """At the end of a run that went well: who is missing."""
    missing = sorted(loss.rank for loss in lost)
    finished = [rank for rank in range(workers) if rank not in missing]
    return f"finished by {named('worker', finished)}, without {named('worker', missing)}"


def note_end(run_dir: Path, rank: int, returncode: int) -> None:
    """Leave word that a worker's process has ended; there as a whole or not at all."""
    path = _path(run_dir, rank)
    part = path.with_suffix(".part")
    name = signal_name(-returncode) if returncode < 0 else None
    document = {"rank": rank, "returncode": returncode, "signal": name}
    part.write_text(json.dumps({**document, "time_ns": time.monotonic_ns()}), encoding="utf-8")
    os.replace(part, path)


def is_gone(run_dir: str | Path, rank: int) -> bool:
    """Whether a worker's process has ended, well or badly, in a run that survives losses."""
    return _path(run_dir, rank).exists()


def named(role: str, ranks: Sequence[int]) -> str:
    """`worker 1`, `workers 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    return f"{role}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _how(death: Death) -> str:
    if death.returncode < 0:
        return f"was killed by {signal_name(-death.returncode)}"
    return "gave up, having lost its peers,"


def _path(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / f"gone-{rank}.json"
