"""What runs now: one entry per run of this user on this host, in its run directory.

The launcher writes the entry when it starts. The directory counts as abandoned when the launcher
has ended, however it did, so there is no entry of a run that does not run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec.structs import asdict, replace

from shoal.errors import BadInput
from shoal.runtime.files import remove_abandoned
from shoal.runtime.run_dir import RunDir, read, running_runs
from shoal.runtime.waits import Backoff

_MAX_WORKERS = 1_000_000
# fmt: off
_NAMES = (  # none is the name of an engine or launcher
    "anchovy", "anthias", "barbel", "bass", "betta", "bleak", "blenny",
    "bonito", "bream", "brill", "burbot", "carp", "catfish", "char",
    "chub", "cod", "dab", "dace", "danio", "dory", "eel",
    "flounder", "gar", "goby", "grayling", "grouper", "gurnard", "guppy",
    "haddock", "hake", "halibut", "herring", "hoki", "ide", "killi",
    "koi", "ling", "loach", "mackerel", "marlin", "minnow", "molly",
    "mullet", "opah", "orfe", "parr", "perch", "pike", "plaice",
    "pollack", "roach", "ruffe", "salmon", "sardine", "scad",
    "shad", "smelt", "snapper", "sole", "sprat", "sturgeon", "tang",
    "tench", "tetra", "tilapia", "trout", "tuna", "turbot", "wahoo",
    "whiting", "wrasse", "zander",
)
# fmt: on


class RunFacts(msgspec.Struct, frozen=True):
    """What a launcher says of its run; the last three are written when it is entered."""

    strategy: str
    workers: int
    servers: int
    command: tuple[str, ...]
    hosts: tuple[str, ...]  # of the workers, by rank
    session: tuple[int, ...] = ()  # the workers' processes, where the launcher is a notebook
    name: str = ""
    launcher_pid: int = 0
    started: float = 0.0  # seconds since the epoch


class RunEntry(RunFacts, frozen=True, kw_only=True):
    """One run, as its launcher has described it."""

    run_dir: RunDir

    @property
    def steps(self) -> int | None:
        """The most that a worker has done; None before the first."""
        done = [self.run_dir.steps_done(rank) for rank in range(self.workers)]
        return max((steps for steps in done if steps is not None), default=None)

    @property
    def present(self) -> int:
        """The workers that are there: started, and not ended."""
        return sum(not self.run_dir.has_exited(rank) for rank in range(self.workers))

    @property
    def script(self) -> str:
        """What is run, without the interpreter."""
        words = [word for word in self.command[1:] if word != "-m"]
        return words[0] if words else self.command[0] if self.command else "a notebook"

    @property
    def is_there(self) -> bool:
        remove_abandoned()  # a launcher that was killed leaves its folder
        return self.run_dir.is_there()

    def document(self) -> dict[str, object]:
        return {
            "name": self.name,
            "script": self.script,
            "strategy": self.strategy,
            "workers": self.workers,
            "workers_there": self.present,
            "servers": self.servers,
            "hosts": list(self.hosts),
            "started": self.started,
            "step": self.steps,
            "launcher_pid": self.launcher_pid,
            "folder": str(self.run_dir.path),
        }


def enter_run(run_dir: RunDir, facts: RunFacts) -> str:
    """Write the entry of a run that begins; returns its name."""
    name = _free_name(entry.name for entry in entries())
    entered = replace(facts, name=name, launcher_pid=os.getpid(), started=time.time())
    run_dir.write(run_dir.entry, asdict(entered))
    return name


def entries() -> list[RunEntry]:
    """The runs that go on, the oldest first."""
    found = [_read(run_dir) for run_dir in running_runs()]
    return sorted((entry for entry in found if entry), key=lambda entry: entry.started)


def find_run(name: str) -> RunEntry:
    """By its name, its folder, or the first letters of its name; BadInput lists those there are."""
    known = entries()
    named = [entry for entry in known if name in (entry.name, str(entry.run_dir.path))]
    begins = [entry for entry in known if entry.name.startswith(name)] if name else []
    found = named or begins
    if len(found) == 1:
        return found[0]
    if not known:
        raise BadInput(f"there is no run {name!r}: none of yours runs on this host")
    names = ", ".join(entry.name for entry in found or known)
    if found:
        raise BadInput(f"{name!r} is not the name of one run: {names}")
    raise BadInput(f"there is no run {name!r}: {names} {'run' if len(known) > 1 else 'runs'} here")


def run_name(run_dir: RunDir) -> str:
    """As `shoal ps` shows it; the folder of a run without an entry."""
    names = {entry.run_dir: entry.name for entry in entries()}
    return names.get(run_dir, str(run_dir.path))


def _free_name(taken: Iterable[str]) -> str:
    used = set(taken)
    names = random.SystemRandom().sample(_NAMES, len(_NAMES))
    free = (name for name in names if name not in used)
    numbered = (f"{names[0]}-{n}" for n in range(2, 100_000) if f"{names[0]}-{n}" not in used)
    return next(free, None) or next(numbered)


def _read(run_dir: RunDir) -> RunEntry | None:
    """None where there is no entry, or none that this version has written."""
    try:
        facts = msgspec.convert(read(run_dir.entry), RunFacts, strict=False)
    except msgspec.ValidationError:
        return None
    if not facts.name or facts.workers > _MAX_WORKERS:
        return None
    return RunEntry(run_dir=run_dir, **asdict(facts))


_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.2
_NOW_S = 10.0


@dataclass(frozen=True)
class StoppedRun:
    """How a run ended that was asked to."""

    name: str
    steps: int | None
    has_ended: bool
    was_killed: bool = False

    def __str__(self) -> str:
        at = "before its first step" if self.steps is None else f"after step {self.steps}"
        if not self.has_ended:
            return f"{self.name} has not ended yet: shoal stop {self.name} --now ends it"
        return f"{self.name} was killed {at}" if self.was_killed else f"{self.name} has ended {at}"


def stop_run(entry: RunEntry, now: bool, limit_s: float) -> StoppedRun:
    """Ask the run to end and wait, at most for so long; with `now` it is killed then."""
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    steps = entry.steps
    _ask(entry, now)
    deadline_s = time.monotonic() + (_NOW_S if now else limit_s)
    was_killed = False
    while entry.is_there:
        steps = entry.steps or steps
        if now and not entry.session:
            _send([entry.launcher_pid], signal.SIGTERM)  # the second one ends the grace
        if time.monotonic() > deadline_s:
            if not now or was_killed:
                return StoppedRun(entry.name, steps, False)
            _send(entry.session or [entry.launcher_pid], signal.SIGKILL)
            was_killed = True
            deadline_s = time.monotonic() + _NOW_S
        pause()
    return StoppedRun(entry.name, steps, True, now)


def _ask(entry: RunEntry, now: bool) -> None:
    if not entry.session:
        _send([entry.launcher_pid], signal.SIGTERM)
        return
    if not now:
        entry.run_dir.mark(entry.run_dir.preempted)
    _send(entry.session, signal.SIGKILL if now else signal.SIGTERM)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
