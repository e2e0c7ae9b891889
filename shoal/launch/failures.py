"""Which worker failed first, and how to say it.

When one worker goes, the others soon lose their connection to it and fail as well. What they
say is an echo. The first failure is the earliest one that is no echo:

    worker left                      its time is
    a report (`report_failure`)      when the error was caught
    nothing: it was killed           when noticed, less 0.3 s: nothing in the job causes a kill,
                                     and peers may report its loss before we notice it
    nothing: it crashed or exited    when noticed
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import (
    BadInput,
    PeerLost,
    ServerFailed,
    ShoalError,
    WorkersFailed,
    tells_of_lost_peer,
)
from shoal.launch.processes import Role

_HEAD_START_NS = 300_000_000
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


@dataclass(frozen=True)
class Report:
    """What a worker writes of its own failure, in `failure-{rank}.json`."""

    time_ns: int  # time.monotonic_ns(), one clock for all processes of a host
    exit_status: int
    sentence: str  # the message of an error of ours, for the person; empty for others
    traceback: str
    lost_peer: bool = False  # an echo of another worker's failure


@dataclass(frozen=True)
class Death:
    """A worker that ended badly, or a server that ended at all, as the launcher knows it."""

    rank: int
    returncode: int  # as of Popen: -9 for SIGKILL
    noticed_ns: int
    report: Report | None = None
    stderr_tail: str = ""
    role: Role = "worker"

    @property
    def is_loss(self) -> bool:
        """Killed, or out of touch with the others; not by an error of its own code."""
        return self.returncode < 0 if self.report is None else self.report.lost_peer


def report_failure(run_dir: str | Path, rank: int, error: BaseException) -> None:
    """Leave word of why this worker fails; call it where the error is caught, at the top.

    The first report of a worker stays. It is there as a whole or not at all.
    """
    path = _path(run_dir, rank)
    if path.exists():
        return
    report = Report(
        time_ns=time.monotonic_ns(),
        exit_status=_exit_status(error),
        sentence=str(error) if isinstance(error, ShoalError) else "",
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        lost_peer=_is_lost_peer(error),
    )
    part = path.with_suffix(".part")
    with suppress(OSError):  # a full disk must not hide the error that is being reported
        part.write_text(json.dumps(asdict(report)), encoding="utf-8")
        os.replace(part, path)


def report_finished(run_dir: str | Path, rank: int) -> None:
    """Leave word that this worker is through, before it takes down what others may wait for."""
    with suppress(OSError):
        (Path(run_dir) / f"finished-{rank}").touch()


def finished_workers(run_dir: str | Path) -> list[int]:
    """The workers that were through, the first one first."""
    marks = sorted(Path(run_dir).glob("finished-*"), key=lambda mark: mark.stat().st_mtime_ns)
    return [int(mark.name.removeprefix("finished-")) for mark in marks]


def read_report(run_dir: str | Path, rank: int) -> Report | None:
    """The worker's own report; None when it left none, or none that can be read."""
    try:
        found = json.loads(_path(run_dir, rank).read_bytes())
        return Report(
            time_ns=int(found["time_ns"]),
            exit_status=int(found["exit_status"]),
            sentence=str(found["sentence"]),
            traceback=str(found["traceback"]),
            lost_peer=bool(found.get("lost_peer", False)),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def first_failure(deaths: Iterable[Death]) -> Death:
    """The failure that brought the others about; `deaths` must not be empty."""
    return min(deaths, key=lambda death: (_is_echo(death), _time_ns(death), death.rank))


def as_error(death: Death, finished: Sequence[int] = ()) -> ShoalError:
    """What the launcher raises for it: a mistake of the user as such, with no traceback.

    `finished` are workers that had ended well by then.
    """
    if death.role == "server":
        return _server_failed(death)
    if finished and _is_echo(death):
        return WorkersFailed(
            death.rank,
            1,
            f"worker {death.rank} was still at work when worker {finished[0]} had finished: all "
            "workers have to take the same steps and make the same calls",
        )
    report = death.report
    rank = death.rank
    if report is not None:
        if report.exit_status == 2 and report.sentence:
            return BadInput(report.sentence)
        return WorkersFailed(rank, report.exit_status, _failed(rank, report))
    if death.returncode < 0:
        return WorkersFailed(rank, 128 - death.returncode, _killed(death))
    report = Report(death.noticed_ns, death.returncode, "", death.stderr_tail)
    return WorkersFailed(rank, death.returncode, _failed(rank, report))


def _server_failed(death: Death) -> ServerFailed:
    code = death.returncode
    how = f"ended with exit status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
    says = f":\n{death.stderr_tail}" if death.stderr_tail else ""
    return ServerFailed(death.rank, f"{how} while workers needed it{says}")


def _failed(rank: int, report: Report) -> str:
    text = report.traceback.rstrip("\n") or "it wrote nothing to stderr"
    return f"worker {rank} failed (exit status {report.exit_status}):\n{text}"


def _killed(death: Death) -> str:
    number = -death.returncode
    says = f":\n{death.stderr_tail}" if number in _CRASHES and death.stderr_tail else ""
    return f"worker {death.rank} was killed by {signal_name(number)}{says}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _time_ns(death: Death) -> int:
    if death.report is not None:
        return death.report.time_ns
    return death.noticed_ns - (_HEAD_START_NS if _is_kill(death) else 0)


def _is_kill(death: Death) -> bool:
    """Ended by a signal that does not come from its own code."""
    return death.returncode < 0 and -death.returncode not in _CRASHES


def _is_echo(death: Death) -> bool:
    if death.report is not None:
        return death.report.lost_peer
    last_lines = "\n".join(death.stderr_tail.splitlines()[-10:])
    return not _is_kill(death) and tells_of_lost_peer(last_lines)


def _is_lost_peer(error: BaseException | None) -> bool:
    """The error, or one that it was raised from or while handling, tells of a lost connection."""
    seen: set[int] = set()  # `raise error from error` makes a ring
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (PeerLost, ConnectionError)):
            return True
        if isinstance(error, (RuntimeError, OSError)) and tells_of_lost_peer(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, BadInput) else 1


def _path(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / f"failure-{rank}.json"
