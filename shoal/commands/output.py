"""How every command prints: one JSON document, or tables and lines; and how it writes a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.errors import BadInput


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


Part = Table | Text | str


def bold(text: str) -> Text:
    return Text(text, style="bold")


def show(document: Any, parts: Iterable[Part], as_json: bool, width: int = 120) -> None:
    """Print the document as JSON, or else these tables and lines."""
    if as_json:
        print(json.dumps(document))
        return
    console = wide_console(width)
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table), markup=False)


def plain_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 0
) -> Table:
    """A table without lines that fits 80 columns; the first `left` columns are words."""
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
    for row in rows:
        table.add_row(*row)
    return table


def wide_console(width: int = 120) -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)
