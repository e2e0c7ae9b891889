"""What several commands share: a console, and writing a file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from shoal.errors import BadInput


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def wide_console(width: int = 120) -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
