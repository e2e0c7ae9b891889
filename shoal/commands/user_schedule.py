"""What the commands about schedules share: how they write, and load a user's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.errors import BadInput


def call_own(name: str, *args: Any) -> Any:
    """What `FILE.py:FUNCTION` of the user makes of the arguments; None: no such function."""
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("own_schedule", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadInput(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = getattr(module, function, None)
        return made(*args) if callable(made) else None
    except Exception as error:  # whatever the user's file or function raises
        raise BadInput(f"{name} raised {type(error).__name__}: {error}") from error


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def wide_console(width: int = 120) -> Console:
    """As wide as the terminal; where there is none, wide enough for the table."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
