"""The directory of a run, which only this user can read: names of its files, and their contents.

    lock                 locked while the process that made the directory, or a fork of it, runs
    secret               32 random bytes in hexadecimal; processes of the run prove it to each other
    store/               rendezvous of the workers (launch/rank/rendezvous.py)
    all-joined           every worker has joined the group
    failure-2.json       why worker 2 failed, written by the worker
    finished-0           worker 0 has finished
    training-0           worker 0 is in a call of shoal.run, maybe after one that it has finished
    exited-2.json        the process of worker 2 has exited, written by the launcher
    joins/               requests of `shoal join`; join-….json is the answer of the launcher
    run.json             what runs here, for `shoal ps` and `shoal stop` (launch/here/running.py)
    steps-2              how many steps worker 2 has done
    started-2            how often worker 2 was started again; then exited-2.1.json …
    back-2.1.json        how it took its place among the others
    late-2.1             it came when the others had finished
    memory-…/            where workers find memory that they share (shm/lasting_memory.py)
    meetings-1           what all workers did together (comm/members/meetings.py, elastic_sum.py)
    members-1            generations of the group of an elastic run (comm/members/membership.py)
    preempted  ending    the launcher got SIGTERM; it ends the workers
    at-0.step last.step  how far worker 0 is, and where all stop, after SIGTERM
    report-0.json        what happened on worker 0
    operations-1.txt     the last operations of a shared-memory group, when one failed
    server-0.sock        a server's socket; .address holds its TCP address,
                         .pid the number of its process
    killed-server-0-50   a worker has killed server 0 at step 50 (--kill)
    coordinator.sock     the coordinator's socket; .address holds its TCP address, .log its records
    start-1/             broadcasts at the start of the first shoal.run (executors/deferred.py)
    spans-0.json         the trace of worker 0 (in the folder of a trace or of a compared run)
    begun                a compared run has begun (in its folder)

Files that another process waits for appear atomically: complete, or not at all.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.runtime.files import (
    make_locked,
    remove_abandoned,
    remove_locked,
    room_for,
    temporary_folder,
    write_atomically,
)
from shoal.runtime.secret import new_secret, read_secret_file, write_secret_file

_MAX_DIGITS = 18
_MAX_REPORT_BYTES = 64 << 20
_LONGEST_SOCKET_PATH = 100  # of 108 bytes in sockaddr_un


@dataclass(frozen=True)
class RunDir:
    """One run's directory. Every path inside of it is made here."""

    path: Path

    # ------------------------------------------------------------------ names

    @property
    def secret(self) -> Path:
        return self.path / "secret"

    @property
    def rendezvous(self) -> str:
        """The rendezvous of the workers, as a URL."""
        return f"file://{self.path}/store"

    @property
    def all_joined(self) -> Path:
        return self.path / "all-joined"

    @property
    def armed(self) -> Path:
        """Failpoints of tests that come later count from here on."""
        return self.path / "armed"

    @property
    def begun(self) -> Path:
        """Marks a run of `shoal compare` that has begun."""
        return self.path / "begun"

    def failure(self, rank: int) -> Path:
        return self.path / f"failure-{rank}.json"

    def finished(self, rank: int) -> Path:
        return self.path / f"finished-{rank}"

    def exited(self, rank: int, generation: int = 0) -> Path:
        return self.path / f"exited-{_life(rank, generation)}.json"

    def back(self, rank: int, generation: int) -> Path:
        return self.path / f"back-{_life(rank, generation)}.json"

    def steps(self, rank: int) -> Path:
        return self.path / f"steps-{rank}"

    def late(self, rank: int, generation: int) -> Path:
        return self.path / f"late-{_life(rank, generation)}"

    @property
    def joins(self) -> Path:
        return self.path / "joins"

    def meetings(self, run_number: int) -> Path:
        """For what all workers do together, where lost ones may come back."""
        return self.path / f"meetings-{run_number}"

    def members(self, run_number: int) -> Path:
        """Who forms the group of an elastic run."""
        return self.path / f"members-{run_number}"

    def report(self, rank: int) -> Path:
        return self.path / f"report-{rank}.json"

    def operations(self, rank: int) -> Path:
        return self.path / f"operations-{rank}.txt"

    def spans(self, rank: int) -> Path:
        return self.path / f"spans-{rank}.json"

    def all_spans(self) -> list[Path]:
        return list(self.path.glob("spans-*.json"))

    def socket(self, index: int) -> str:
        """The address of server `index` on this host."""
        return f"unix:{self.path / f'server-{index}.sock'}"

    def server_address(self, index: int) -> Path:
        """Holds the address of server `index` for other hosts."""
        return self.path / f"server-{index}.address"

    def read_server_pid(self, index: int) -> int | None:
        """The number of the process that serves as server `index`, if the launcher noted it."""
        with suppress(OSError, ValueError):
            pid = int((self.path / f"server-{index}.pid").read_text()[:_MAX_DIGITS])
            return pid if pid > 1 else None
        return None

    def note_server_pid(self, index: int, pid: int) -> None:
        write_atomically(self.path / f"server-{index}.pid", str(pid))

    def remove_socket(self, index: int) -> None:
        """Of a server that was killed: another process is to listen there."""
        with suppress(FileNotFoundError):
            os.unlink(self.socket(index).removeprefix("unix:"))

    def claim_kill(self, server: int, step: int) -> bool:
        """True for the first process that asks."""
        with suppress(FileExistsError):
            (self.path / f"killed-server-{server}-{step}").touch(exist_ok=False)
            return True
        return False

    @property
    def coordinator(self) -> str:
        """The address of the coordinator on this host."""
        return f"unix:{self.path / 'coordinator.sock'}"

    @property
    def coordinator_address(self) -> Path:
        """Holds the address of the coordinator for other hosts."""
        return self.path / "coordinator.address"

    @property
    def coordinator_log(self) -> Path:
        return self.path / "coordinator.log"

    def start_folder(self, run_number: int) -> Path:
        """For the broadcasts before the group exists."""
        return self.path / f"start-{run_number}"

    def memory_folder(self, name: str) -> Path:
        """Where workers that come back find the memory of the others."""
        return self.path / f"memory-{name}"

    def memory_folders(self) -> list[Path]:
        return list(self.path.glob("memory-*"))

    @property
    def entry(self) -> Path:
        return self.path / "run.json"

    def write_entry(self, document: Mapping[str, Any]) -> None:
        """A full disk does not fail the run, which is then not shown."""
        with suppress(OSError):
            write_atomically(self.entry, json.dumps(document))

    def read_entry(self) -> dict[str, Any] | None:
        return _read_json(self.entry)

    # ------------------------------------------------------------------ marks of workers

    def mark_all_joined(self) -> None:
        self.all_joined.touch()

    def have_all_joined(self) -> bool:
        return self.all_joined.exists()

    def mark_training(self, rank: int) -> None:
        """This worker has called shoal.run."""
        with suppress(OSError):
            (self.path / f"training-{rank}").touch()

    def mark_finished(self, rank: int) -> None:
        """This worker has finished; written before it closes what others may wait for."""
        with suppress(OSError):
            self.finished(rank).touch()
            (self.path / f"training-{rank}").unlink(missing_ok=True)

    def has_ended_training(self, rank: int) -> bool:
        """Whether this worker has finished and not called shoal.run again."""
        is_training = (self.path / f"training-{rank}").exists()
        return self.finished(rank).exists() and not is_training

    def finished_ranks(self) -> list[int]:
        """The workers that have finished, in that order."""
        marks = sorted(self.path.glob("finished-*"), key=lambda mark: mark.stat().st_mtime_ns)
        return [int(mark.name.removeprefix("finished-")) for mark in marks]

    def note_exit(self, rank: int, returncode: int) -> None:
        """The process of a worker has exited; what it wrote before is final."""
        name = signal_name(-returncode) if returncode < 0 else None
        document = {"rank": rank, "returncode": returncode, "signal": name}
        text = json.dumps({**document, "time_ns": time.monotonic_ns()})
        write_atomically(self.exited(rank, self.generation(rank)), text)

    def has_exited(self, rank: int) -> bool:
        """Whether the process of a worker has exited, with success or not."""
        return self.has_ended(rank, self.generation(rank))

    def has_ended(self, rank: int, generation: int) -> bool:
        """The same of one process of a worker that was started several times."""
        return self.exited(rank, generation).exists()

    # ------------------------------------------------------------------ workers that come back

    def open_joins(self) -> None:
        """The launcher starts workers that are asked for (launch/losses/joining.py)."""
        self.joins.mkdir(mode=0o700)

    def takes_joins(self) -> bool:
        return self.joins.is_dir()

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
        generation = None if rank is None else self.generation(rank)
        with suppress(OSError):
            text = json.dumps({"sentence": sentence, "rank": rank, "generation": generation})
            write_atomically(self.path / f"join-{request}.json", text)

    def read_join_answer(self, request: str) -> dict[str, Any] | None:
        return _read_json(self.path / f"join-{request}.json")

    def is_there(self) -> bool:
        """Whether it is the directory of a run that goes on."""
        return (self.path / "lock").is_file()

    def steps_done(self, rank: int) -> int | None:
        """Of a worker, by its own count; None where it has not done any, or does not count."""
        with suppress(OSError):
            return _read_count(self.steps(rank)) or None
        return None

    def write_steps(self, rank: int, steps: int) -> None:
        """Of a worker on another host."""
        with suppress(OSError):
            write_atomically(self.steps(rank), str(steps))

    def mark_too_late(self, rank: int, generation: int) -> None:
        """A worker that was started later found that the others had finished."""
        with suppress(OSError):
            self.late(rank, generation).touch()

    def came_too_late(self, rank: int) -> bool:
        return self.late(rank, self.generation(rank)).exists()

    def generation(self, rank: int) -> int:
        """How often this worker was started again."""
        try:
            return _read_count(self.path / f"started-{rank}")
        except FileNotFoundError:
            return 0

    def note_start(self, rank: int, generation: int) -> None:
        """It is about to be started again; why it failed before does not count any more."""
        self.failure(rank).unlink(missing_ok=True)
        write_atomically(self.path / f"started-{rank}", str(generation))

    def note_return(self, rank: int, generation: int, document: Mapping[str, Any]) -> None:
        with suppress(OSError):
            text = json.dumps({"time_ns": time.monotonic_ns(), **document})
            write_atomically(self.back(rank, generation), text)

    def read_return(self, rank: int, generation: int) -> dict[str, Any] | None:
        return _read_json(self.back(rank, generation))

    # ------------------------------------------------------------------ preemption

    def mark_preempted(self) -> None:
        """The launcher was asked to end (SIGTERM): workers may save before they exit."""
        with suppress(OSError):
            (self.path / "preempted").touch()

    def is_preempted(self) -> bool:
        return (self.path / "preempted").exists()

    def mark_ending(self) -> None:
        """The launcher ends the workers: they exit at once."""
        with suppress(OSError):
            (self.path / "ending").touch()

    def is_ending(self) -> bool:
        return (self.path / "ending").exists()

    def note_step(self, rank: int, steps: int) -> None:
        """How far a worker is that was asked to stop."""
        write_atomically(self.path / f"at-{rank}.step", str(steps))

    def noted_steps(self) -> dict[int, int]:
        return {
            int(mark.stem.removeprefix("at-")): _read_count(mark)
            for mark in self.path.glob("at-*.step")
        }

    def write_last_step(self, steps: int) -> None:
        """All workers stop after this step."""
        write_atomically(self.path / "last.step", str(steps))

    def last_step(self) -> int | None:
        try:
            return _read_count(self.path / "last.step")
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ reports

    def write_report(self, rank: int, report: Mapping[str, Any]) -> None:
        """What happened on this worker; a full disk does not fail a run that succeeded."""
        with suppress(OSError):
            write_atomically(self.report(rank), json.dumps(report))

    def read_reports(self, workers: int) -> list[dict[str, Any] | None]:
        """The reports by rank; None for a worker without a readable one."""
        return [self.read_report(rank) for rank in range(workers)]

    def read_report(self, rank: int) -> dict[str, Any] | None:
        return _read_json(self.report(rank))

    # ------------------------------------------------------------------ the secret

    def write_secret(self, secret: bytes) -> None:
        """Fails if there is one already."""
        write_secret_file(self.secret, secret)

    def read_secret(self) -> bytes | None:
        """None where there is none; BadInput if other users could read it."""
        return read_secret_file(self.secret) if self.secret.is_file() else None

    def remove(self) -> None:
        remove_locked(self.path)


@contextmanager
def new_run_dir(
    kind: Literal["run", "host", "ps"] = "run", secret: bytes | None = None
) -> Iterator[RunDir]:
    """A directory with this secret, or a fresh one; removed at the end of the block.

    host, ps: for workers, or a server, on one host of a run on several.
    """
    remove_abandoned()
    run_dir = new_server_dir() if kind == "ps" else RunDir(make_locked(kind))
    try:
        with room_for(run_dir.path):
            run_dir.write_secret(secret or new_secret())
        yield run_dir
    finally:
        run_dir.remove()


def running_runs() -> list[RunDir]:
    """The directories of runs of this user that go on, on this host."""
    remove_abandoned()
    with suppress(OSError):
        locks = Path(tempfile.gettempdir()).glob("shoal-run-*/lock")
        return sorted(
            (RunDir(lock.parent) for lock in locks if lock.lstat().st_uid == os.getuid()),
            key=lambda run_dir: run_dir.path,
        )
    return []


def new_server_dir() -> RunDir:
    """A directory for servers that a worker starts; its path is short enough for sockets."""
    remove_abandoned()
    longest = len(temporary_folder()) + len("/shoal-ps-12345678/server-000.sock")
    return RunDir(make_locked("ps", "/tmp" if longest > _LONGEST_SOCKET_PATH else None))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _life(rank: int, generation: int) -> str:
    return f"{rank}.{generation}" if generation else str(rank)


def _read_count(path: Path) -> int:
    text = path.read_text()
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
