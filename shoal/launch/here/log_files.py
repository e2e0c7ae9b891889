"""The output of every process of a run, in a file of its own: `shoal run --logs DIR`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shoal.errors import BadInput

Log = Callable[[bytes], None]  # complete lines


def no_log(lines: bytes) -> None:
    """Without --logs."""


class LogFiles:
    """rank-0.log, server-1.log, launcher.log …: made at the start, written line by line.

    A disk that is full ends the files, and not the run.
    """

    def __init__(self, folder: Path | None, appends: bool = False):
        """Files of an earlier run in the folder are replaced, unless this one continues it."""
        self._mode = "ab" if appends else "wb"
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise BadInput(f"--logs takes a folder, and {folder} is a file") from error
            except OSError as error:
                why = error.strerror
                raise BadInput(f"--logs: cannot make the folder {folder}: {why}") from error

    def of(self, role: str, number: int | None = None) -> Log:
        """Where the lines of one process go, also when it is started again."""
        if self._folder is None:
            return no_log
        name = role if number is None else f"{role}-{number}"
        if name not in self._files:
            path = self._folder / f"{name}.log"
            try:
                self._files[name] = path.open(self._mode, buffering=0)
            except OSError as error:
                raise BadInput(f"--logs: cannot write {path}: {error.strerror}") from error
        return lambda lines: self._write(name, lines)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> LogFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, lines: bytes) -> None:
        file = self._files[name]
        if file.closed:
            return
        try:
            file.write(lines)
        except OSError as error:
            file.close()
            print(
                f"shoal: {name}.log ends here: {error.strerror}; the run goes on", file=sys.stderr
            )
