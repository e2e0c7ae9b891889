"""What several commands share: a console, and writing a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.errors import BadInput


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def plain_table(title: str, heads: Sequence[str], left: int = 0) -> Table:
    """A table without lines, one space between columns: numbers fit 80 columns.

    The first `left` columns are words. A head may have several lines.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right")
    return table


def wide_console(width: int = 120) -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
