"""Workers that come after the start of a run: `shoal run -n 4 --start 2`, then `shoal join`.

`shoal join` leaves a request in the run directory; the launcher finds it, starts the worker with
the lowest number that is not there, as one that comes back, and answers. So every worker is a child
of its launcher, which forwards its output and ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.launch.here.running import find_run, run_name
from shoal.launch.here.watches import looking
from shoal.runtime.files import remove_abandoned
from shoal.runtime.run_dir import RunDir, running_runs

_POLL_S = 0.2
_LOOK_S = 0.05
_ANSWER_S = 60.0
_HOW = "start it with --elastic, --restart, or --start for fewer workers than -n"


@dataclass(frozen=True)
class JoinRequest:
    """A worker more is asked for; its name in the run directory."""

    name: str


@contextmanager
def join_requests(
    run_dir: RunDir, put: Callable[[JoinRequest], None], is_open: bool = True
) -> Iterator[None]:
    """While the block runs a thread looks for requests; `is_open`: workers may come later."""

    def look() -> None:
        for name in run_dir.take_joins():
            put(JoinRequest(name))

    if not is_open:
        yield
        return
    run_dir.open_joins()
    with looking("shoal-join", _POLL_S, look):
        yield


def ask_to_join(run: str | None) -> tuple[RunDir, str]:
    """Ask a run on this host for one worker more; the run, and the name of the request.

    `run` is a name that `shoal ps` shows, or a folder. BadInput where no such run takes one.
    """
    run_dir = _only_run() if run is None else _run_of(run)
    return run_dir, run_dir.ask_for_join()


def _only_run() -> RunDir:
    takes = [run_dir for run_dir in running_runs() if run_dir.joins.is_dir()]
    if not takes:
        raise BadInput(f"no run of yours on this host takes a worker: {_HOW}")
    if len(takes) > 1:
        names = ", ".join(map(run_name, takes))
        raise BadInput(f"several runs take a worker: name one of them: {names}")
    return takes[0]


def _run_of(name: str) -> RunDir:
    remove_abandoned()
    run_dir = RunDir(Path(name)) if "/" in name else find_run(name).run_dir
    if not run_dir.is_there():
        raise BadInput(f"{name} is not the folder of a run that goes on")
    if not run_dir.joins.is_dir():
        raise BadInput(f"the run {name} takes no worker: {_HOW}")
    return run_dir


@dataclass(frozen=True)
class StartedWorker:
    """What a launcher says of the worker that it has started."""

    rank: int
    incarnation: int
    sentence: str


def wait_for_answer(run_dir: RunDir, request: str, limit_s: float = _ANSWER_S) -> StartedWorker:
    """ShoalError where the launcher has not started a worker."""
    deadline_s = time.monotonic() + limit_s
    while (answer := run_dir.read_join_answer(request)) is None:
        if not run_dir.is_there():
            raise ShoalError(f"no worker is started: the run in {run_dir.path} has ended")
        if time.monotonic() > deadline_s:
            raise ShoalError(f"the run in {run_dir.path} has not answered for {limit_s:g} s")
        time.sleep(_LOOK_S)
    rank, incarnation = answer.get("rank"), answer.get("incarnation")
    if not isinstance(rank, int) or not isinstance(incarnation, int):
        raise ShoalError(str(answer.get("sentence")))
    return StartedWorker(rank, incarnation, str(answer.get("sentence")))


def wait_until_joined(run_dir: RunDir, worker: StartedWorker) -> None:
    """ShoalError where it has not taken its place: the run has finished, or it has failed."""
    rank, incarnation = worker.rank, worker.incarnation
    while True:
        is_there = run_dir.is_there()
        has_ended = run_dir.has_ended(rank, incarnation)  # what it wrote before is final
        if run_dir.read_return(rank, incarnation) is not None:
            return
        if run_dir.late(rank, incarnation).exists():
            raise ShoalError(f"worker {rank} has not joined: the run had finished when it came")
        if not is_there:
            raise ShoalError(f"the run has ended, and worker {rank} had not joined it by then")
        if has_ended:
            raise ShoalError(f"worker {rank} has exited and not joined: see the output of the run")
        time.sleep(_LOOK_S)
