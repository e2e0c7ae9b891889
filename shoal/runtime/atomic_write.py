"""Files that other processes wait for."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file that other processes see complete or not at all."""
    unfinished = path.with_suffix(".part")
    data = content.encode() if isinstance(content, str) else content
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
