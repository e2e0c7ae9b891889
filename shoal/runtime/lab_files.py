"""Files of labs (`shoal lab`), by name. They last until the machine restarts, as a lab does.

lab.json    what `shoal lab up` was asked for; there before the first namespace is made, and locked
            as long as the lab is being built
lab.toml    the cluster file of a lab that is complete
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.runtime.files import write_atomically
from shoal.runtime.run_dir import read

FOLDER = Path("/run/shoal-lab")  # root makes labs; other users may read what they are
DEFAULT_LAB = "lab"
_MAX_BYTES = 1 << 16
_BUILDER = "builder_pid"  # in lab.json


@dataclass(frozen=True)
class LabFiles:
    name: str

    @property
    def state(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def cluster(self) -> Path:
        return FOLDER / f"{self.name}.toml"

    @contextmanager
    def claimed(self, document: dict[str, Any]) -> Iterator[bool]:
        """Write what the lab is to be, which is built in the block.

        False where there is one of this name.
        """
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        try:
            handle = os.open(self.state, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            yield False
            return
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump({**document, _BUILDER: os.getpid()}, file)
            file.flush()
            yield True

    def builder(self) -> str | None:
        """Which process builds the lab now; None where none does."""
        try:
            with self.state.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = (read(self.state, _MAX_BYTES) or {}).get(_BUILDER)
            return f"process {pid}" if isinstance(pid, int) else "another process"
        except OSError:
            return None
        return None

    def complete(self, cluster_text: str) -> None:
        write_atomically(self.cluster, cluster_text)

    @property
    def is_complete(self) -> bool:
        return self.cluster.is_file()

    def read(self) -> dict[str, Any] | None:
        """What the lab is to be; None where there is none."""
        document = read(self.state, _MAX_BYTES)
        return document and {key: document[key] for key in document if key != _BUILDER}

    def exist(self) -> bool:
        return self.state.exists() or self.cluster.exists()

    def remove(self) -> None:
        self.cluster.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)
        with suppress(OSError):  # of other labs
            FOLDER.rmdir()


def lab_names() -> list[str]:
    """Of all labs of this machine."""
    return sorted({path.stem for path in FOLDER.glob("*.json")})
