"""The folder of a checkpoint: versions, and a manifest that names the current one.

    manifest.json                              the pointer; replaced by a rename
    model-120-3fa9c1d2e4b5.safetensors         of version 3fa9c1d2e4b5, saved after 120 steps
    optimizer-120-3fa9c1d2e4b5.safetensors
    saving-77b0c1d2e4b5/                       version 77b0c1d2e4b5 is being written here,
    saving-77b0c1d2e4b5.lock                   by a process that holds this lock

A saver holds a lock on its own lock file from before its first file until its version is current.
The system releases it when the saver dies. So a version without a lock has ended, and if the
manifest does not name it then, it never will: the next save removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_COUNT = 10**12  # of steps, which are a part of file names
TENSOR_FILE = re.compile(r"(?:model|optimizer)-[0-9]{1,12}-(?P<token>[0-9a-f]{6,16})\.safetensors")
_PARTIAL_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.(?P<token>[0-9a-f]{6,16})")
_WORKPLACE = re.compile(r"saving-(?P<token>[0-9a-f]{6,16})")
_LOCK = re.compile(r"saving-(?P<token>[0-9a-f]{6,16})\.lock")


class Version:
    """The files of one save, before the manifest names them.

    They are written in a folder of their own: libraries make temporary files beside them.
    """

    def __init__(self, folder: Path, token: str):
        self.folder = folder
        self.token = token
        self.workplace = folder / f"saving-{token}"

    def tensor_file(self, part: str, steps: int) -> Path:
        return self.workplace / f"{part}-{steps}-{self.token}.safetensors"

    def publish(self, manifest: bytes) -> None:
        """Make this version the current one, also for a machine that loses power right after."""
        for file in self.workplace.iterdir():
            os.rename(file, self.folder / file.name)
        partial = self.folder / f"{MANIFEST}.{self.token}"
        with open(partial, "wb") as handle:
            handle.write(manifest)
            handle.flush()
            os.fsync(handle.fileno())
        sync_folder(self.folder)
        os.replace(partial, self.folder / MANIFEST)
        sync_folder(self.folder)


@contextmanager
def new_version(folder: Path) -> Iterator[Version]:
    """A version that no other saver removes while the block runs.

    At the end all versions are removed that are not current: this one, too, if it was not
    published.
    """
    _make_folder(folder)
    token, descriptor = _claim(folder)
    version = Version(folder, token)
    try:
        version.workplace.mkdir()
        yield version
    finally:
        shutil.rmtree(version.workplace, ignore_errors=True)
        _lock_file(folder, token).unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):
            _remove_old(folder)


def open_file(file: Path) -> int:
    """A descriptor of a regular file: what it leads to stays readable when a saver removes it."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return descriptor


def read_manifest_bytes(folder: Path) -> bytes | None:
    """At most one byte more than a manifest may have; None if there is none."""
    try:
        descriptor = open_file(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as handle:
        return handle.read(MAX_MANIFEST_BYTES + 1)


def sync_file(file: Path) -> None:
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in it durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    folder = folder.absolute()
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def _lock_file(folder: Path, token: str) -> Path:
    return folder / f"saving-{token}.lock"


def _claim(folder: Path) -> tuple[str, int]:
    """The token of a new version, and the descriptor that holds its lock."""
    while True:
        token = secrets.token_hex(6)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        descriptor = os.open(_lock_file(folder, token), flags, 0o666)
        # another saver may have taken it for dead between the two calls, and removed it
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


def _remove_old(folder: Path) -> None:
    """Remove versions that are not current and not being saved; other files stay."""
    versions: dict[str, list[Path]] = {}
    for file in folder.iterdir():
        for pattern in (TENSOR_FILE, _PARTIAL_MANIFEST, _WORKPLACE, _LOCK):
            if found := pattern.fullmatch(file.name):
                versions.setdefault(found["token"], []).append(file)
    for token, files in versions.items():
        with _locked(_lock_file(folder, token)) as is_dead:
            # only now: a saver that has ended has replaced the manifest before
            if is_dead and token not in _current(folder, versions):
                for file in sorted(files, key=lambda file: _LOCK.fullmatch(file.name) is not None):
                    _remove(file)


def _remove(file: Path) -> None:
    if _WORKPLACE.fullmatch(file.name):
        shutil.rmtree(file, ignore_errors=True)
    else:
        file.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path) -> Iterator[bool]:
    """Whether the save that the lock file belongs to has ended."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _lock(descriptor) is True
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
