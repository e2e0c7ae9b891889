"""Files of labs (`shoal lab`), by name. They last until the machine restarts, as a lab does.

lab.json    what `shoal lab up` was asked for; there before the first namespace is made
lab.toml    the cluster file of a lab that is complete
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.runtime.atomic_write import write_atomically

FOLDER = Path("/run/shoal-lab")  # root makes labs; other users may read what they are
DEFAULT_LAB = "lab"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class LabFiles:
    name: str

    @property
    def state(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def cluster(self) -> Path:
        return FOLDER / f"{self.name}.toml"

    def claim(self, document: dict[str, Any]) -> bool:
        """Write what the lab is to be; False where there is one of this name."""
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        try:
            handle = os.open(self.state, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file)
        return True

    def complete(self, cluster_text: str) -> None:
        write_atomically(self.cluster, cluster_text)

    @property
    def is_complete(self) -> bool:
        return self.cluster.is_file()

    def read(self) -> dict[str, Any] | None:
        """What the lab is to be; None where there is none."""
        try:
            document = json.loads(self.state.read_bytes()[:_MAX_BYTES])
        except (OSError, ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

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
