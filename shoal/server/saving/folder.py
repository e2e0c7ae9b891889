"""The folder of server checkpoints: one folder for each, which the parts of a run fill.

    step-000000000200-3fa9c1d2e4b50718/      of model 3fa9…, when a worker had done 200 steps
        shard-0-of-2.safetensors            weights, optimizer, ledger and rows of one server
        shard-1-of-2.safetensors
        worker.safetensors                   buffers, position in the data, names of parameters

A checkpoint is complete when all of its files are there. A file appears under its name by a rename
when all of it is on the disk, so a complete checkpoint stays one whatever dies meanwhile.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.runtime.failpoints import failpoint
from shoal.runtime.wording import counted

WORKER_FILE = "worker.safetensors"
KEPT = 2  # complete checkpoints that are not removed
MAX_NUMBER = 10**12
_MAX_SERVERS = 1 << 16
_VERSION = re.compile(r"step-(?P<number>[0-9]{12})-(?P<model>[0-9a-f]{16})")
_SHARD = re.compile(r"shard-(?P<index>[0-9]{1,5})-of-(?P<servers>[0-9]{1,5})\.safetensors")


class SavedVersion(NamedTuple):
    """One checkpoint in a folder, complete or not."""

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


def version_of(folder: Path, number: int, model: int) -> SavedVersion:
    return SavedVersion(folder / f"step-{number:012d}-{model:016x}", number, model)


def shard_name(index: int, servers: int) -> str:
    return f"shard-{index}-of-{servers}.safetensors"


def versions_in(folder: Path) -> list[SavedVersion]:
    """The latest first; none where there is no folder."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if matched := _VERSION.fullmatch(path.name):
                found.append(SavedVersion(path, int(matched["number"]), int(matched["model"], 16)))
    return sorted(found, key=lambda version: version.number, reverse=True)


def complete_versions(folder: Path) -> list[SavedVersion]:
    return [version for version in versions_in(folder) if version.is_complete]


def require_unused(others: Sequence[SavedVersion], folder: Path) -> None:
    """Refuse a folder that has checkpoints of another run, which this one does not continue."""
    for version in others[:1]:
        raise BadInput(
            f"{folder} has the checkpoint of another run after {counted(version.number, 'step')}: "
            "go on from it with --resume, or use another folder"
        )


def remove_old(folder: Path, present: SavedVersion) -> None:
    """Keep the last complete ones, and `present` and later ones, which others may be writing.

    Every process calls it when its file is there: the one that completes `present` keeps KEPT.
    """
    complete = complete_versions(folder)
    kept = {version.path for version in complete[:KEPT]}
    for version in versions_in(folder):
        if version.number >= present.number:
            continue
        if version.path not in kept:
            shutil.rmtree(version.path, ignore_errors=True)
        else:
            for workplace in version.path.glob("writing-*"):  # of a process that was killed
                shutil.rmtree(workplace, ignore_errors=True)


def remove_incomplete(folder: Path) -> None:
    """When no process of the run is left that could complete them."""
    for version in versions_in(folder):
        if not version.is_complete:
            shutil.rmtree(version.path, ignore_errors=True)


def write_durably(version: SavedVersion, name: str, write: Callable[[Path], None]) -> None:
    """Write a file by `write(path)` so that it is there under its name complete, or not at all."""
    failpoint("snapshot.begin")
    _make_folder(version.path)
    workplace = version.path / f"writing-{name}-{secrets.token_hex(6)}"
    workplace.mkdir()  # libraries make temporary files beside theirs
    try:
        temporary = workplace / name
        write(temporary)
        failpoint("snapshot.temporary")
        _sync(temporary, os.O_RDONLY)
        failpoint("snapshot.fsync")
        os.rename(temporary, version.path / name)
        failpoint("snapshot.rename")
        _sync(version.path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        _sync(place.parent, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
