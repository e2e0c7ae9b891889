"""Temporary folders of this user, and files that other processes read while they are written.

A folder holds a file `lock`, which is locked while the process that made the folder, or a fork of
it, runs. It counts as abandoned when the lock is free; the next process that makes one removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import BadInput
from shoal.runtime import clock

_KINDS = (
    *("run", "ps"),  # of launchers, and of servers that workers start
    "host",  # of the workers of one host, where an engine lends several
    "ray",  # of a Ray cluster for one run
    *(
        "auto",
        "bench",
        "call",
        "collective",
        "compare",
        "eval",
        "keys",
        "memory",
        "predict",
        "profile",
    ),
    *("profile", "rehearse", "trace", "verify", "workload"),  # of commands: see scratch_folder
)
_LOCKED_NAME = re.compile(rf"shoal-({'|'.join(_KINDS)})-\w{{8}}")
_locks: dict[Path, int] = {}  # open files that mark the folders of this process as in use


def make_locked(kind: str, parent: str | None = None) -> Path:
    """A new folder; it counts as abandoned when this process and its forks have ended."""
    assert kind in _KINDS, kind
    folder = parent or temporary_folder()
    with room_for(Path(folder)):
        path = Path(tempfile.mkdtemp(prefix=f"shoal-{kind}-", dir=folder))
        unlocked = path / "new"
        handle = os.open(unlocked, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _locks[path] = handle
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.rename(unlocked, path / "lock")  # it is locked from the moment when it can be found
    return path


def remove_locked(path: Path) -> None:
    """The lock is freed last, so that no other process removes the same files."""
    shutil.rmtree(path, ignore_errors=True)
    lock = _locks.pop(path, None)
    if lock is not None:
        os.close(lock)


def remove_abandoned() -> None:
    """Remove folders of this user whose process was killed: their lock is free."""
    with suppress(OSError):
        folders = {Path(tempfile.gettempdir()), Path("/tmp")}  # of servers: new_server_dir
        made = [folder / name for folder in folders for name in os.listdir(folder)]
        for path in made:
            if _LOCKED_NAME.fullmatch(path.name) and path not in _locks:
                _remove_if_abandoned(path / "lock")


def _remove_if_abandoned(lock: Path) -> None:
    with suppress(OSError):
        if lock.lstat().st_uid != os.getuid():
            return
        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(handle)


def own_folder() -> Path:
    """For what processes of this user share on this host; others cannot enter it.

    In the user's home where another user has taken its name.
    """
    name = f"shoal-{os.getuid()}"
    folder = Path(temporary_folder()).absolute() / name
    try:
        make_private(folder)
    except (BadInput, OSError):
        folder = Path(os.path.expanduser("~")).absolute() / ".cache" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private(folder)
    return folder


def make_private(directory: Path) -> None:
    """BadInput where it is there and another user owns it or could use it."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_mode & 0o077:
        raise BadInput(
            f"{directory} is not a directory that only you can use: remove it, "
            "or set TMPDIR to a directory of your own"
        )


def open_file(file: Path) -> int:
    """A descriptor of a regular file: what it leads to stays readable when a saver removes it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return descriptor


def read_bounded(file: Path, most_bytes: int) -> bytes:
    """A file from outside; BadInput where it cannot be read, is no regular file or is larger."""
    try:
        with open(open_file(file), "rb") as handle:
            data = handle.read(most_bytes + 1)
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise BadInput(f"{file} has more than {most_bytes >> 10} KiB: that is another kind of file")
    return data


@contextmanager
def locked(path: Path, mode: int = os.O_RDWR | os.O_CREAT, flags: int = 0) -> Iterator[int]:
    """A file or folder, while no other process has it."""
    handle = os.open(path, mode | os.O_CLOEXEC, 0o600)
    try:
        clock.lock_file(handle, fcntl.LOCK_EX | flags)
        yield handle
    finally:
        os.close(handle)  # and with it the lock


def document_of(data: bytes | str) -> dict[str, Any] | None:
    """A JSON object from outside; None where it is none, or is nested too deep."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise BadInput(f"there is no folder for temporary files: {error}; set TMPDIR") from error


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """BadInput where the block cannot write there."""
    try:
        yield
    except FileExistsError:  # written by another process: there is room
        raise
    except OSError as error:
        raise BadInput(
            f"cannot write the files of the run to {path}: {error.strerror}; make room there, "
            "or set TMPDIR to another folder"
        ) from error


@contextmanager
def scratch_folder(kind: str, parent: str | None = None) -> Iterator[Path]:
    """Removed at the end of the block; if this process is killed, by the next that makes one."""
    remove_abandoned()
    path = make_locked(kind, parent)
    try:
        yield path
    finally:
        remove_locked(path)


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file that other processes see complete or not at all."""
    unfinished = path.with_suffix(".part")
    data = content.encode() if isinstance(content, str) else content
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


class StepCount:
    """The steps of a worker, in a file that outlives it: one write of 18 bytes a step, in place.

    A full disk does not stop training.
    """

    def __init__(self, file: Path):
        """Keeps what an earlier process of the worker has written, until the first `note`."""
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, steps: int) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, b"%018d" % steps, 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
