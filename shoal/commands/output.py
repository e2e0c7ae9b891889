"""How every command prints: one JSON document, or tables and lines; and how it writes a file."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.errors import BadInput
from shoal.observe.time_shares import TimeShares, shown_parts, waits
from shoal.runtime.tables import plain_table as plain_table
from shoal.runtime.trace import Process
from shoal.runtime.wording import printable


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


Part = Table | Text | str
_WRAP = partial(textwrap.TextWrapper, break_long_words=False, break_on_hyphens=False)


def bold(text: str) -> Text:
    return Text(text, style="bold")


def show(
    document: Any, parts: Iterable[Part], as_json: bool, width: int = 120, wraps: bool = False
) -> None:
    """Print the document as JSON, or else these tables and lines, which `wraps` breaks."""
    if as_json:
        print(json_text(document))
        return
    console = wide_console(width)
    for part in parts:
        shown = wrapped(part, console.width) if wraps and not isinstance(part, Table) else part
        console.print(shown, soft_wrap=not isinstance(part, Table), markup=False)


def json_text(document: Any) -> str:
    return json.dumps(_finite(document), allow_nan=False)


def _finite(document: Any) -> Any:
    """What JSON can say: it has no nan and no infinity."""
    if isinstance(document, Mapping):
        return {key: _finite(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [_finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def wrapped(part: Text | str, width: int) -> Text:
    """Lines of at most 80 columns, or of a narrower terminal; what goes on is indented."""
    lines = []
    for line in str(part).split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines.append(_WRAP(width=min(width, 80), subsequent_indent=indent).fill(line))
    return Text("\n".join(lines), style=part.style if isinstance(part, Text) else "")


def shares_of_time(shares: Mapping[Process, TimeShares], of: str = "training") -> list[Part]:
    """Where the time of each rank went, and whom it waited for."""
    parts = shown_parts(shares.values())
    rows = [
        [str(rank), f"{each.seconds:.2f}", *(f"{getattr(each, name):.1%}" for name in parts)]
        for rank, each in shares.items()
    ]
    title = f"where the time went, in {of}"
    heads = ["rank", "seconds", *parts]
    return [plain_table(title, heads, rows), *waits(shares)]


class PrintableConsole(Console):
    """Names from files cannot steer the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def wide_console(width: int = 120) -> Console:
    """As wide as the terminal, or as COLUMNS says; without both, wide enough for a table."""
    return PrintableConsole(width=shutil.get_terminal_size((width, 0)).columns, highlight=False)
