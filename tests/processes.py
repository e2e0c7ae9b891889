"""Ranks that are processes of their own, each of which leaves its findings in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import forked

ROOT = Path(__file__).parents[1]


def resident_mb(pid: int | str = "self") -> float:
    """What a process takes of the memory of this host."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def findings(module: str, size: int, folder: Path, timeout_s: float = 90.0) -> list[Any]:
    """What `python -m module RANK SIZE FOLDER` leaves in FOLDER/RANK.json, by rank.

    All of them have ended.
    """
    with open(folder / "output", "wb") as output:
        processes = [
            forked.Popen(
                [sys.executable, "-m", module, str(rank), str(size), str(folder)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.wait(timeout=timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    files = [folder / f"{rank}.json" for rank in range(size)]
    assert all(file.is_file() for file in files), (folder / "output").read_text()
    return [json.loads(file.read_text()) for file in files]
