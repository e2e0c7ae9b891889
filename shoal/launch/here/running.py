"""What runs now: one entry per run of this user on this host, in its run directory.

The launcher writes the entry when it starts. The directory counts as abandoned when the launcher
has ended, however it did, so there is no entry of a run that does not run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, NewType

import msgspec
from msgspec.structs import asdict, replace

from shoal.errors import BadInput, ShoalError
from shoal.runtime.files import remove_abandoned
from shoal.runtime.run_dir import RunDir, read, running_runs
from shoal.runtime.waits import Backoff, Periodic

_MAX_WORKERS = 1_000_000
_NAMES = (  # none is the name of an engine or launcher
    *("anchovy", "bass", "bream", "carp", "cod", "dace", "dory", "eel", "gar", "goby", "guppy"),
    *("hake", "herring", "koi", "ling", "loach", "marlin", "minnow", "perch", "pike", "roach"),
    *("salmon", "shad", "sole", "sprat", "tench", "tetra", "trout", "tuna", "turbot", "wrasse"),
)


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
    names = ", ".join(entry.name for entry in found or known) or "none of yours"
    what = f"{name!r} begins the names of several" if found else f"there is no run {name!r}"
    raise BadInput(f"{what}: on this host runs {names}")


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
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None
    if not facts.name or facts.workers > _MAX_WORKERS:
        return None
    return RunEntry(run_dir=run_dir, **asdict(facts))


_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.2
_NOW_S = 10.0


def stop_run(entry: RunEntry, now: bool, limit_s: float) -> tuple[bool, str]:
    """Ask the run to end and wait, at most for so long; with `now` it is killed then.

    Whether it has ended, and a sentence.
    """
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
                late = f"{entry.name} has not ended yet: shoal stop {entry.name} --now ends it"
                return False, late
            _send(entry.session or [entry.launcher_pid], signal.SIGKILL)
            was_killed = True
            deadline_s = time.monotonic() + _NOW_S
        pause()
    at = "before its first step" if steps is None else f"after step {steps}"
    return True, f"{entry.name} {'was killed' if now else 'has ended'} {at}"


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


_POLL_S = 0.2
_LOOK_S = 0.05
_ANSWER_S = 60.0
_HOW = "start it with --elastic, --restart, or --start for fewer workers than -n"


JoinRequest = NewType("JoinRequest", str)  # for a worker more: its name in the run directory


@contextmanager
def join_requests(
    run_dir: RunDir, put: Callable[[JoinRequest], None], is_open: bool = True
) -> Iterator[None]:
    """While the block runs a thread looks for requests; `is_open`: workers may come later."""

    def look() -> None:
        for name in run_dir.take_joins():
            put(JoinRequest(name))

    if is_open:
        run_dir.joins.mkdir(mode=0o700)
    with Periodic("shoal-join", _POLL_S, look) if is_open else nullcontext():
        yield


def ask_to_join(run: str | None) -> tuple[RunDir, str]:
    """Ask a run on this host for one worker more; the run, and the name of the request.

    `run` is a name that `shoal ps` shows, or a folder. BadInput where no such run takes one.
    """
    takes = [run_dir for run_dir in running_runs() if run_dir.joins.is_dir()]
    if run is not None:
        remove_abandoned()
        takes = [RunDir(Path(run)) if "/" in run else find_run(run).run_dir]
        if not takes[0].is_there():
            raise BadInput(f"{run} is not the folder of a run that goes on")
        if not takes[0].joins.is_dir():
            raise BadInput(f"the run {run} takes no worker: {_HOW}")
    if not takes:
        raise BadInput(f"no run of yours on this host takes a worker: {_HOW}")
    if len(takes) > 1:
        names = ", ".join(map(run_name, takes))
        raise BadInput(f"several runs take a worker: name one of them: {names}")
    return takes[0], takes[0].ask_for_join()


class StartedWorker(NamedTuple):
    """What a launcher says of the worker that it has started."""

    rank: int
    incarnation: int
    sentence: str


def wait_for_answer(run_dir: RunDir, request: str, limit_s: float = _ANSWER_S) -> StartedWorker:
    """ShoalError where the launcher has not started a worker."""
    deadline_s = time.monotonic() + limit_s
    while (answer := read(run_dir.join_answer(request))) is None:
        if not run_dir.is_there():
            raise ShoalError(f"no worker is started: the run in {run_dir.path} has ended")
        if time.monotonic() > deadline_s:
            raise ShoalError(f"the run in {run_dir.path} has not answered for {limit_s:g} s")
        time.sleep(_LOOK_S)
    rank = answer.get("rank")
    incarnation = answer.get("incarnation")
    if not isinstance(rank, int) or not isinstance(incarnation, int):
        raise ShoalError(str(answer.get("sentence")))
    return StartedWorker(rank, incarnation, str(answer.get("sentence")))


def wait_until_joined(run_dir: RunDir, worker: StartedWorker) -> None:
    """ShoalError where it has not taken its place: the run has finished, or it has failed."""
    rank, incarnation, _ = worker
    is_over = False
    while read(run_dir.back(rank, incarnation)) is None:
        if is_over:
            raise ShoalError(
                f"worker {rank} has not joined: the run had finished, or see its output"
            )
        is_over = not run_dir.is_there() or run_dir.has_ended(rank, incarnation)
        if not is_over:  # then what it wrote is final
            time.sleep(_LOOK_S)
