"""Which worker failed first, and the error that the launcher raises for it.

When one worker fails, the others soon lose their connection to it and fail as well. Their errors
are consequences. The first failure is the earliest one that is no consequence:

    the worker left                   its time is
    a report (`report_failure`)       when the error was caught
    nothing: it was killed            when noticed, less 0.3 s: nothing in the job causes a kill,
                                      and peers may report its loss before the launcher notices it
    nothing: it crashed or exited     when noticed
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

import shoal
from shoal import errors
from shoal.runtime import clock
from shoal.runtime.decoders import decode_json
from shoal.runtime.files import write_atomically
from shoal.runtime.run_dir import RunDir, signal_name

if TYPE_CHECKING:
    from shoal.launch.here.processes import Role

_HEAD_START_NS = 300_000_000
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}

_OUT_OF_MEMORY = (
    ", of the kernel's out-of-memory killer: take fewer workers, a smaller batch, or more memory"
)
_SENTENCES = (errors.BadInput, errors.CheckFailed)  # that tell all: no traceback


@dataclass(frozen=True)
class FailureReport:
    """What a worker writes about its own failure, in `failure-{rank}.json`."""

    time_ns: int  # time.monotonic_ns(), one clock for all processes of a host
    exit_status: int
    sentence: str  # the message of an error of Shoal, for the user; empty for other errors
    traceback: str
    lost_peer: bool = False  # a consequence of another worker's failure


@dataclass(frozen=True)
class ProcessFailure:
    """A worker that exited with an error, or a server that exited, as the launcher knows it."""

    rank: int
    returncode: int  # as in Popen: -9 for SIGKILL
    noticed_ns: int
    report: FailureReport | None = None
    stderr_tail: str = ""
    role: Role = "worker"
    out_of_memory: bool = False  # the kernel has killed for memory while the run was going on
    sentence: str = ""  # of a server: what its loss means, instead of how it ended
    host: str = ""  # its name, where workers are on several

    @property
    def ending(self) -> str:
        """ "was killed by SIGKILL", for a process that was."""
        number = -self.returncode
        struck = self.out_of_memory and number == signal.SIGKILL
        return f"was killed by {signal_name(number)}{_OUT_OF_MEMORY if struck else ''}"

    @property
    def is_loss(self) -> bool:
        """Killed, or it lost its peers; not an error of its own code."""
        return self.returncode < 0 if self.report is None else self.report.lost_peer


def when_lost(age_s: float, is_again: bool) -> str:
    """When a process was lost, counted from its own start."""
    return f"{age_s:.1f} s after it was started again" if is_again else f"after {age_s:.1f} s"


def report_failure(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Write why this worker failed; call it where the error is caught, at the top.

    The first report of a worker stays.
    """
    if run_dir.failure(rank).exists():
        return
    report = FailureReport(
        time_ns=clock.monotonic_ns(),
        exit_status=_exit_status(error),
        sentence=str(error) if isinstance(error, errors.ShoalError) else "",
        traceback=""
        if isinstance(error, _SENTENCES)
        else "".join(traceback.format_exception(error)),
        lost_peer=_is_lost_peer(error),
    )
    write_failure(run_dir, rank, report)


def write_failure(run_dir: RunDir, rank: int, report: FailureReport) -> None:
    with suppress(OSError):  # a full disk must not hide the error that is being reported
        write_atomically(run_dir.failure(rank), msgspec.json.encode(report))


def why_too_late(rank: int, have_finished: bool, is_elastic: bool) -> errors.ShoalError | None:
    """Why a worker cannot come back; None where the others have finished."""
    doing = "coming back: all workers were lost, and with them what they had trained"
    if not have_finished and is_elastic:  # no worker that is started again could do better
        return errors.ShoalError(f"worker {rank}, {doing}")
    return None if have_finished else errors.PeerLost(rank, None, doing)


def read_failure(run_dir: RunDir, rank: int) -> FailureReport | None:
    """The worker's own report; None when there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        return decode_json(run_dir.failure(rank).read_bytes(), FailureReport)
    return None


def first_failure(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """The failure that caused the others; `failures` must not be empty."""
    return min(
        failures, key=lambda failure: (_is_consequence(failure), _time_ns(failure), failure.rank)
    )


def launch_error(failure: ProcessFailure, finished: Sequence[int] = ()) -> errors.ShoalError:
    """What the launcher raises for it; a mistake of the user comes without a traceback.

    `finished` are the workers that had finished by then.
    """
    rank = failure.rank
    code = failure.returncode
    report = failure.report
    who = f"{failure.role} {rank}" + (f" on {failure.host}" if failure.host else "")
    tail = f":\n{failure.stderr_tail}" if failure.stderr_tail else ""
    if failure.role == "server":
        how = f"ended with exit status {code}" if code >= 0 else failure.ending
        if failure.sentence:
            of_last = "" if _is_kill(failure) else f"\nserver {rank} {how}{tail}"
            return errors.ShardLost(rank, f"{failure.sentence}{of_last}")
        where = f"on {failure.host} " if failure.host else ""
        return errors.ServerFailed(
            rank, f"{where}{how} while workers needed it{tail}", is_loss=code < 0
        )
    if finished and _is_consequence(failure):
        late = f"{who} was still running when worker {finished[0]} had finished: all workers have"
        why = f"{late} to take the same steps and make the same calls, {errors.ALSO}"
        return errors.WorkersFailed(rank, 1, why)
    if report is None and code < 0:
        text = f"{who} {failure.ending}{tail if -code in _CRASHES else ''}"
        return errors.WorkersFailed(rank, 128 - code, text, failure.is_loss)
    status = code
    trace = failure.stderr_tail
    if report is not None:
        status = report.exit_status
        trace = report.traceback or report.sentence
        if status == 2 and report.sentence:
            return errors.BadInput(report.sentence)
    text = trace.rstrip("\n") or "it wrote nothing to stderr"
    text = f"{who} failed (exit status {status}):\n{text}"
    return errors.WorkersFailed(rank, status, text, failure.is_loss)


def _time_ns(failure: ProcessFailure) -> int:
    if failure.report is not None:
        return failure.report.time_ns
    return failure.noticed_ns - (_HEAD_START_NS if _is_kill(failure) else 0)


def _is_kill(failure: ProcessFailure) -> bool:
    """Killed by a signal that does not come from its own code."""
    return failure.returncode < 0 and -failure.returncode not in _CRASHES


def _is_consequence(failure: ProcessFailure) -> bool:
    if failure.report is not None:
        return failure.report.lost_peer
    last_lines = "\n".join(failure.stderr_tail.splitlines()[-10:])
    return not _is_kill(failure) and errors.tells_of_lost_peer(last_lines)


def _is_lost_peer(error: BaseException | None) -> bool:
    """The error, or one that it was raised from or while handling, is a lost connection."""
    seen: set[int] = set()  # `raise error from error` makes a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (errors.PeerLost, ConnectionError)):
            return True
        if isinstance(error, (RuntimeError, OSError)) and errors.tells_of_lost_peer(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, errors.BadInput) else 1


def end_with_sentence() -> None:
    """From now on; a hook of the script's own stays."""
    if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):
        sys.excepthook = _hook


def add_line_of_script(error: BaseException) -> None:
    """Add the line of the script to a mistake that is reported in one sentence."""
    package = str(Path(shoal.__file__).parent)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in f.filename
        and not f.filename.startswith((package, sys.base_prefix, "<"))
    ]
    if isinstance(error, _SENTENCES) and frames:
        error.args = (f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})",)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, _SENTENCES):
        sys.__excepthook__(kind, error, trace)
        return
    add_line_of_script(error)
    sys.stdout.flush()
    # torch's hook around this one, once there is a process group, keeps what is written to
    # sys.stderr and forgets it at an exit
    stream = sys.stderr if sys.excepthook is _hook else sys.__stderr__ or sys.stderr
    print(f"shoal: {error}", file=stream, flush=True)
    sys.exit(_exit_status(error))
