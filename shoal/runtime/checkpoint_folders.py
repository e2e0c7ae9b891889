"""Folders of checkpoints: versions that appear complete or not at all, and how old ones leave.

Of a job (`job.save`): one version, that the manifest names.

    manifest.json                              the pointer; replaced by a rename
    model-120-3fa9c1d2e4b5.safetensors         of version 3fa9c1d2e4b5, saved after 120 steps
    optimizer-120-3fa9c1d2e4b5.safetensors
    saving-77b0c1d2e4b5/                       version 77b0c1d2e4b5 is being written here, by a
                                               process that holds a lock on the file `lock` in it

The system releases the lock when the saver dies. So a version without a lock has ended, and if the
manifest does not name it then, it never will: the next save removes it.

Of servers (`--server-checkpoint`): a folder for each version, which the processes of a run fill.

    step-000000000200-3fa9c1d2e4b50718/      of model 3fa9…, when a worker had done 200 steps
        shard-0-of-2.safetensors            weights, optimizer, ledger and rows of one server
        shard-1-of-2.safetensors
        worker.safetensors                   buffers, position in the data, names of parameters

It is complete when all of its files are there, and the last complete ones are kept.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shoal.errors import BadInput, CheckpointError
from shoal.runtime.background_writer import BackgroundWriter
from shoal.runtime.files import open_file
from shoal.runtime.wording import counted

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_COUNT = 10**12  # of steps, which are a part of file names
TENSOR_FILE = re.compile(r"(?:model|optimizer)-[0-9]{1,12}-(?P<token>[0-9a-f]{6,16})\.safetensors")
_WORKPLACE = re.compile(r"saving-(?P<token>[0-9a-f]{6,16})")

WORKER_FILE = "worker.safetensors"
KEPT = 2  # complete checkpoints of servers that are not removed
_MAX_SERVERS = 1 << 16
_VERSION = re.compile(r"step-(?P<number>[0-9]{12})-(?P<model>[0-9a-f]{16})")
_SHARD = re.compile(r"shard-(?P<index>[0-9]{1,5})-of-(?P<servers>[0-9]{1,5})\.safetensors")
_OS_ERROR = re.compile(r"\(os error ([0-9]{1,4})\)")  # in errors of safetensors


def make_folder(folder: Path) -> None:
    """With all folders above it, also for a machine that loses power right after."""
    folder = folder.absolute()
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_path(place.parent)


def sync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def damaged(where: Path, what: object) -> CheckpointError:
    """To be raised for a checkpoint, or one of its files, that cannot be what was saved."""
    return CheckpointError(f"the checkpoint at {where} is damaged: {what}")


def in_words(error: BaseException) -> str:
    """`no space left on device`; the text of the error where the system has no part in it."""
    matched = _OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else None
    if number is None and matched is not None:
        number = int(matched[1])
    if number is None:
        return str(error)
    words = os.strerror(number)
    return words[:1].lower() + words[1:]


# ---------------------------------------------------------------------- of a job


class NewVersion:
    """The files of one save, before the manifest names them.

    They are written in a folder of their own: libraries make temporary files beside them.
    """

    def __init__(self, folder: Path, token: str):
        self._folder = folder
        self._token = token
        self._workplace = folder / f"saving-{token}"
        self._files: list[Path] = []

    def tensor_file(self, part: str, steps: int) -> Path:
        self._files.append(self._workplace / f"{part}-{steps}-{self._token}.safetensors")
        return self._files[-1]

    def publish(self, manifest: bytes) -> None:
        """Make this version, whose files are complete, the current one."""
        unpublished = self._workplace / MANIFEST
        unpublished.write_bytes(manifest)
        for file in (*self._files, unpublished):
            sync_path(file)
        for file in self._files:
            os.rename(file, self._folder / file.name)
        sync_path(self._folder)
        os.replace(unpublished, self._folder / MANIFEST)
        sync_path(self._folder)


@contextmanager
def new_version(folder: Path) -> Iterator[NewVersion]:
    """A version that no other saver removes while the block runs.

    At the end all versions are removed that are not current: this one, too, if it was not
    published.
    """
    removals.join()  # there is space for two versions, it may be
    make_folder(folder)
    token, descriptor = _claim(folder)
    try:
        yield NewVersion(folder, token)
    finally:
        shutil.rmtree(folder / f"saving-{token}", ignore_errors=True)
        os.close(descriptor)
        with suppress(OSError):
            _remove_others(folder)


def read_manifest_bytes(folder: Path) -> bytes | None:
    """At most one byte more than a manifest may have; None if there is none."""
    try:
        descriptor = open_file(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as handle:
        return handle.read(MAX_MANIFEST_BYTES + 1)


def _claim(folder: Path) -> tuple[str, int]:
    """The token of a new version, and the descriptor that holds the lock of its workplace."""
    while True:
        token = secrets.token_hex(6)
        workplace = folder / f"saving-{token}"
        workplace.mkdir()
        with suppress(FileNotFoundError):  # another saver has taken this one for dead
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            descriptor = os.open(workplace / "lock", flags, 0o666)
            if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return token, descriptor
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_others(folder: Path) -> None:
    """Remove versions that are not current and not being saved; other files stay."""
    versions: dict[str, list[Path]] = {}
    for file in folder.iterdir():
        if found := _WORKPLACE.fullmatch(file.name):
            versions.setdefault(found["token"], [])
        elif found := TENSOR_FILE.fullmatch(file.name):
            versions.setdefault(found["token"], []).append(file)
    for token, files in versions.items():
        # the manifest is read after that: a saver that has ended has replaced it before
        if _has_ended(folder / f"saving-{token}") and token not in _current(folder, versions):
            _remove_files(files)


def _remove_files(files: list[Path]) -> None:
    """Their names are gone when this returns. To free their space takes as long as to write it.

    The system does that when a thread has closed them here, or this process has ended.
    """
    for file in files:
        with suppress(FileNotFoundError):
            _removed.add(os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
            file.unlink()
    removals.join()
    removals.start(_close_removed)


removals = BackgroundWriter()
_removed: set[int] = set()  # descriptors of files without a name


def _close_removed() -> None:
    while _removed:
        os.close(_removed.pop())  # in this order: a fork meanwhile must not close another file


os.register_at_fork(after_in_child=_close_removed)


def _has_ended(workplace: Path) -> bool:
    """Whether no save writes in a workplace any more; then it is removed."""
    for _ in range(2):
        try:
            descriptor = os.open(workplace / "lock", os.O_RDWR | os.O_CLOEXEC)
            break
        except FileNotFoundError:
            with suppress(OSError):
                workplace.rmdir()  # a saver that has no lock in it yet claims another one
                return True
    else:  # a saver makes its lock first: this one was killed while it removed its files
        shutil.rmtree(workplace, ignore_errors=True)
        return True
    try:
        if _lock(descriptor) is not True:
            return False
        shutil.rmtree(workplace, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)


def _current(folder: Path, tokens: dict[str, list[Path]]) -> set[str]:
    """The versions that the manifest names; all of `tokens` if it cannot be read."""
    data = read_manifest_bytes(folder)
    if data is None:
        return set()
    try:
        names = [str(entry["name"]) for entry in json.loads(data)["files"].values()]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return set(tokens)
    return {found["token"] for name in names if (found := TENSOR_FILE.fullmatch(name))}


# ---------------------------------------------------------------------- of servers


class ServerVersion(NamedTuple):
    """One checkpoint of servers in a folder, complete or not."""

    path: Path
    number: int  # steps that the worker which asked for it had done
    model: int

    def shard_files(self) -> list[Path] | None:
        """One file of each server, in order; None while one of them is missing."""
        found: dict[int, dict[int, Path]] = {}
        with suppress(OSError):
            for file in self.path.iterdir():
                if matched := _SHARD.fullmatch(file.name):
                    of_size = found.setdefault(int(matched["servers"]), {})
                    of_size[int(matched["index"])] = file
        for servers, files in found.items():
            if 0 < servers <= _MAX_SERVERS and set(files) == set(range(servers)):
                return [files[i] for i in range(servers)]
        return None

    @property
    def is_complete(self) -> bool:
        return self.shard_files() is not None and (self.path / WORKER_FILE).is_file()

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Write a file by `write(path)`, and remove what is older than the last complete ones.

        The file is there under its name complete, or not at all. Every process calls this; the
        one that completes the version removes an old one. Later versions stay: others may be
        writing them.
        """
        make_folder(self.path)
        workplace = self.path / f"writing-{name}-{secrets.token_hex(6)}"
        workplace.mkdir()  # libraries make temporary files beside theirs
        try:
            temporary = workplace / name
            write(temporary)
            sync_path(temporary)
            os.rename(temporary, self.path / name)
            sync_path(self.path)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
        self._remove_older()

    def _remove_older(self) -> None:
        folder = self.path.parent
        kept = {version.path for version in complete_versions(folder)[:KEPT]}
        for version in versions_in(folder):
            if version.number >= self.number:
                continue
            if version.path not in kept:
                shutil.rmtree(version.path, ignore_errors=True)
            else:
                for workplace in version.path.glob("writing-*"):  # of a process that was killed
                    shutil.rmtree(workplace, ignore_errors=True)


def version_of(folder: Path, number: int, model: int) -> ServerVersion:
    return ServerVersion(folder / f"step-{number:012d}-{model:016x}", number, model)


def shard_name(index: int, servers: int) -> str:
    return f"shard-{index}-of-{servers}.safetensors"


def versions_in(folder: Path) -> list[ServerVersion]:
    """The latest first; none where there is no folder."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if matched := _VERSION.fullmatch(path.name):
                found.append(ServerVersion(path, int(matched["number"]), int(matched["model"], 16)))
    return sorted(found, key=lambda version: version.number, reverse=True)


def complete_versions(folder: Path) -> list[ServerVersion]:
    return [version for version in versions_in(folder) if version.is_complete]


def require_unused(others: Sequence[ServerVersion], folder: Path) -> None:
    """Refuse a folder that has checkpoints of another run, which this one does not continue."""
    for version in others[:1]:
        raise BadInput(
            f"{folder} has the checkpoint of another run after {counted(version.number, 'step')}: "
            "go on from it with --resume, or use another folder"
        )


def remove_incomplete(folder: Path) -> None:
    """When no process of the run is left that could complete them."""
    for version in versions_in(folder):
        if not version.is_complete:
            shutil.rmtree(version.path, ignore_errors=True)
