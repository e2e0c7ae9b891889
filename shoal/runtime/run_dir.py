"""The directory of a run, which only this user can read: names of its files, and their contents.

    lock                 locked while the process that made the directory, or a fork of it, runs
    secret               32 random bytes in hexadecimal; processes of the run prove it to each other
    store/               rendezvous of the workers (worker/rendezvous.py)
    all-joined           every worker has joined the group
    failure-2.json       why worker 2 failed, written by the worker
    finished-0           worker 0 has finished
    training-0           worker 0 is in a call of shoal.run, maybe after one that it has finished
    exited-2.0.json      the process of worker 2 has exited, written by the launcher
    joins/               requests of `shoal join`; join-….json is the answer of the launcher
    run.json             what runs here, for `shoal ps` and `shoal stop` (launch/here/running.py)
    steps-2              how many steps worker 2 has done
    started-2            how often worker 2 was started again; then exited-2.1.json …
    back-2.1.json        how it took its place among the others
    late-2.1             it came when the others had finished
    memory-…/            where workers find memory that they share (transport/shm)
    meetings-1           what all workers did together (comm/members/meetings.py)
    begun-1-0            the step that worker 0 is in (train/agreement.py)
    members-1            groups of an elastic run (comm/members/membership.py)
    nccl-1-2             where the GPUs of its generation 2 meet (comm/executors/elastic_nccl.py)
    preempted  ending    the launcher got SIGTERM; it ends the workers
    at-0.step last.step  how far worker 0 is, and where all stop, after SIGTERM
    report-0.json        what happened on worker 0
    operations-1.txt     the last operations of a shared-memory group, when one failed
    server-0.sock        a server's socket; .address holds its TCP address,
                         .pid the number of its process
    killed-server-0-50   a worker has killed server 0 at step 50 (--kill)
    coordinator.sock     the coordinator's socket; .address holds its TCP address, .log its records
    start-1/             broadcasts at the start of the first shoal.run (comm/executors)
    spans-0.json         the trace of worker 0 (in the folder of a trace or of a compared run)
    begun                a compared run has begun (in its folder)

Files that another process waits for appear atomically: complete, or not at all.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import BadInput
from shoal.runtime import clock, files
from shoal.runtime.secret import new_secret, read_secret_file, write_private

RECORDED_TRACE = "trace.json"  # in the folder of --record
RECORDED_REPORT = "report.json"
_MAX_DIGITS = 18
_MAX_REPORT_BYTES = 64 << 20
_LONGEST_SOCKET_PATH = 100  # of 108 bytes in sockaddr_un


_WRITTEN = re.compile(r"(back|failure|finished|late|report|steps)-(\d{1,9})(\.\d{1,9})?(\.json)?")
LIVE = ("back-", "steps-")  # files of `written_by` that count while the worker runs


@dataclass(frozen=True)
class _File:
    """A file of the run: `run_dir.begun` is its path."""

    _name: str

    def __get__(self, run_dir: RunDir, _: object) -> Path:
        return run_dir.path / self._name


@dataclass(frozen=True)
class _Files:
    """Files of the run by number: `run_dir.report(2)` is the path of one."""

    _pattern: str

    def __get__(self, run_dir: RunDir, _: object) -> Callable[..., Path]:
        return lambda *numbers: run_dir.path / self._pattern.format(*numbers)


@dataclass(frozen=True)
class RunDir:
    """One run's directory. Every path inside of it is made here."""

    path: Path

    secret = _File("secret")
    all_joined = _File("all-joined")
    begun = _File("begun")  # a run of `shoal compare`
    preempted = _File("preempted")
    ending = _File("ending")
    joins = _File("joins")
    entry = _File("run.json")
    coordinator_address = _File("coordinator.address")
    coordinator_store = _File("coordinator.store")
    failure = _Files("failure-{}.json")
    finished = _Files("finished-{}")
    exited = _Files("exited-{}.{}.json")  # rank and incarnation
    back = _Files("back-{}.{}.json")
    late = _Files("late-{}.{}")
    steps = _Files("steps-{}")
    report = _Files("report-{}.json")
    operations = _Files("operations-{}.txt")
    spans = _Files("spans-{}.json")
    server_address = _Files("server-{}.address")
    begun_steps = _Files("begun-{}")  # by the numbers of that call and of the worker
    meetings = _Files("meetings-{}")  # by the number of the call of shoal.run
    members = _Files("members-{}")
    nccl_store = _Files("nccl-{}")
    start_folder = _Files("start-{}")
    memory_folder = _Files("memory-{}")  # by a name
    training = _Files("training-{}")  # it has called shoal.run
    _started = _Files("started-{}")
    server_pid = _Files("server-{}.pid")
    join_answer = _Files("join-{}.json")
    _at_step = _Files("at-{}.step")
    _last_step = _File("last.step")

    @property
    def rendezvous(self) -> str:
        """The rendezvous of the workers, as a URL."""
        return f"file://{self.path}/store"

    @property
    def coordinator(self) -> str:
        """The address of the coordinator on this host."""
        return f"unix:{self.path / 'coordinator.sock'}"

    def socket(self, index: int) -> str:
        """The address of server `index` on this host."""
        return f"unix:{self.path / f'server-{index}.sock'}"

    def all_spans(self) -> list[Path]:
        return list(self.path.glob("spans-*.json"))

    def memory_folders(self) -> list[Path]:
        return list(self.path.glob("memory-*"))

    def is_there(self) -> bool:
        """Whether it is the directory of a run that goes on."""
        return (self.path / "lock").is_file()

    def mark(self, file: Path) -> None:
        """A full disk does not fail the run."""
        with suppress(OSError):
            file.touch()

    def write(self, file: Path, document: Mapping[str, Any]) -> None:
        """Of a file that `read` reads; a full disk does not fail the run."""
        with suppress(OSError):
            files.write_atomically(file, json.dumps(document))

    def note(self, file: Path, text: str) -> None:
        """Of a file that other processes wait for: a full disk ends the run in a sentence."""
        with files.room_for(self.path):
            files.write_atomically(file, text)

    # ------------------------------------------------------------------ servers

    def read_server_pid(self, index: int) -> int | None:
        """The number of the process that serves as server `index`, if the launcher noted it."""
        return read_count(self.server_pid(index)) or None

    def remove_socket(self, index: int) -> None:
        """Of a server that was killed: another process is to listen there."""
        Path(self.socket(index).removeprefix("unix:")).unlink(missing_ok=True)

    def claim_kill(self, server: int, step: int) -> bool:
        """True for the first process that asks."""
        with suppress(FileExistsError):
            (self.path / f"killed-server-{server}-{step}").touch(exist_ok=False)
            return True
        return False

    # ------------------------------------------------------------------ marks of workers

    def mark_finished(self, rank: int) -> None:
        """This worker has finished; written before it closes what others may wait for."""
        self.mark(self.finished(rank))
        self.training(rank).unlink(missing_ok=True)

    def has_ended_training(self, rank: int) -> bool:
        """Whether this worker has finished and not called shoal.run again."""
        return self.finished(rank).exists() and not self.training(rank).exists()

    def finished_ranks(self) -> list[int]:
        """The workers that have finished, in that order."""
        marks = sorted(self.path.glob("finished-*"), key=lambda mark: mark.stat().st_mtime_ns)
        return [int(mark.name.removeprefix("finished-")) for mark in marks]

    def note_exit(self, rank: int, returncode: int) -> None:
        """The process of a worker has exited; what it wrote before is final."""
        name = signal_name(-returncode) if returncode < 0 else None
        document = {"rank": rank, "returncode": returncode, "signal": name}
        text = json.dumps({**document, "time_ns": time.monotonic_ns()})
        self.note(self.exited(rank, self.incarnation(rank)), text)

    def has_exited(self, rank: int) -> bool:
        """Whether the process of a worker has exited, with success or not."""
        return self.has_ended(rank, self.incarnation(rank))

    def has_ended(self, rank: int, incarnation: int) -> bool:
        """The same of one process of a worker that was started several times."""
        return self.exited(rank, incarnation).exists()

    def steps_done(self, rank: int) -> int | None:
        """Of a worker, by its own count; None where it has not done any, or does not count."""
        return read_count(self.steps(rank)) or None

    # ------------------------------------------------------------------ workers that come back

    def ask_for_join(self) -> str:
        """Returns the name of the request."""
        handle, path = tempfile.mkstemp(dir=self.joins)
        os.close(handle)
        return Path(path).name

    def take_joins(self) -> list[str]:
        """The requests since the last call."""
        requests = list(self.joins.iterdir())
        for request in requests:
            request.unlink()
        return [request.name for request in requests]

    def answer_join(self, request: str, sentence: str, rank: int | None = None) -> None:
        """`rank`: the worker that is started; None where none is."""
        incarnation = None if rank is None else self.incarnation(rank)
        document = {"sentence": sentence, "rank": rank, "incarnation": incarnation}
        self.write(self.join_answer(request), document)

    def incarnation(self, rank: int) -> int:
        """How often this worker was started again."""
        return read_count(self._started(rank)) or 0

    def note_start(self, rank: int, incarnation: int) -> None:
        """It is about to be started again; why it failed before does not count any more."""
        self.failure(rank).unlink(missing_ok=True)
        self.note(self._started(rank), str(incarnation))

    def note_return(self, rank: int, incarnation: int, document: Mapping[str, Any]) -> None:
        self.write(self.back(rank, incarnation), {"time_ns": clock.monotonic_ns(), **document})

    # ------------------------------------------------------------------ preemption

    def note_step(self, rank: int, steps: int) -> None:
        """How far a worker is that was asked to stop."""
        self.note(self._at_step(rank), str(steps))

    def noted_steps(self) -> dict[int, int]:
        marks = self.path.glob("at-*.step")
        return {int(mark.stem.removeprefix("at-")): read_count(mark) or 0 for mark in marks}

    def write_last_step(self, steps: int) -> None:
        """All workers stop after this step."""
        self.note(self._last_step, str(steps))

    def last_step(self) -> int | None:
        """Asked before every step; hardly ever is there a file."""
        return read_count(self._last_step)

    # ------------------------------------------------------------------ reports, the secret

    def read_reports(self, workers: int) -> list[dict[str, Any] | None]:
        """The reports by rank; None for a worker without a readable one."""
        return [read(self.report(rank)) for rank in range(workers)]

    def write_secret(self, secret: bytes) -> None:
        """Fails if there is one already."""
        write_private(self.secret, secret.hex())

    def read_secret(self) -> bytes | None:
        """None where there is none; BadInput if other users could read it."""
        return read_secret_file(self.secret) if self.secret.is_file() else None


def written_by(name: str) -> int | None:
    """The worker of a file, of those that an agent of its host hands on to the launcher."""
    found = _WRITTEN.fullmatch(name)
    return None if found is None else int(found[2])


def read(file: Path, most_bytes: int = _MAX_REPORT_BYTES) -> dict[str, Any] | None:
    """The document of a file of a run; None where there is none that can be read."""
    try:
        return files.document_of(files.read_bounded(file, most_bytes))
    except BadInput:
        return None


@contextmanager
def new_run_dir(
    kind: Literal["run", "host", "ps"] = "run", secret: bytes | None = None
) -> Iterator[RunDir]:
    """A directory with this secret, or a fresh one; removed at the end of the block.

    host, ps: for workers, or a server, on one host of a run on several.
    """
    with files.scratch_folder(kind, _short_folder() if kind == "ps" else None) as path:
        with files.room_for(path):
            RunDir(path).write_secret(secret or new_secret())
        yield RunDir(path)


def running_runs() -> list[RunDir]:
    """The directories of runs of this user that go on, on this host."""
    files.remove_abandoned()
    with suppress(OSError):
        locks = Path(tempfile.gettempdir()).glob("shoal-run-*/lock")
        return sorted(
            (RunDir(lock.parent) for lock in locks if lock.lstat().st_uid == os.getuid()),
            key=lambda run_dir: run_dir.path,
        )
    return []


def new_server_dir() -> RunDir:
    """A directory for servers that a worker starts; its path is short enough for sockets."""
    files.remove_abandoned()
    return RunDir(files.make_locked("ps", _short_folder()))


def _short_folder() -> str | None:
    longest = len(files.temporary_folder()) + len("/shoal-ps-12345678/server-000.sock")
    return "/tmp" if longest > _LONGEST_SOCKET_PATH else None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def read_count(file: Path) -> int | None:
    """None where there is no file; 0 where it holds no number."""
    try:
        text = file.read_text()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0
