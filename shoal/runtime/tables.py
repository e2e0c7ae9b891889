"""The one table of all commands: it fits the terminal, or is stacked, a block a row.

    worker  params   grads                 worker 0
    0       123 MB  123 MB        →          params  123 MB
                                             grads   123 MB

No heading and no number is cut or broken; words wrap between words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_NARROWEST = 10  # of a column of words that wraps


class FittingTable(Table):
    """Stacks its columns where they are wider than the terminal."""

    heading = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heading:
            yield Text(self.heading, style="bold")
        if self._fits(console, options):
            yield from super().__rich_console__(console, options)
        else:
            yield from self._blocks()

    def _fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Give columns of words what the others leave; False where that is too narrow."""
        left = options.max_width
        wraps = []
        for column in self.columns:
            column.width = None
            column.no_wrap = column.justify == "right"
            natural = self._measure_column(console, options.update(width=10_000), column)
            least = natural.maximum
            if not column.no_wrap:
                folds = column.overflow == "fold"
                word = min(_NARROWEST, natural.maximum)
                least = word if folds else max(natural.minimum, word)
                wraps.append((natural.maximum - least, column, least))
            left -= least
        if left < 0:
            return False
        for number, (wanted, column, least) in enumerate(sorted(wraps, key=lambda one: one[0])):
            more = min(wanted, left // (len(wraps) - number))
            left -= more
            column.width = least + more - self._get_padding_width(column._index)
        return True

    def _blocks(self) -> Iterator[Text]:
        heads = [" ".join(str(column.header).replace("-\n", "").split()) for column in self.columns]
        indent = max(map(len, heads)) + 5
        columns = [map(str, column.cells) for column in self.columns]
        for cells, row in zip(zip(*columns, strict=True), self.rows, strict=True):
            nameless = [cell for head, cell in zip(heads[1:], cells[1:], strict=True) if not head]
            text = Text(" ".join([heads[0], cells[0], *nameless]).strip(), style=row.style or "")
            for head, cell in zip(heads[1:], cells[1:], strict=True):
                if head and cell:
                    text.append(f"\n  {head}".ljust(indent) + " ".join(cell.split()))
            yield text


def plain_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 0
) -> FittingTable:
    """A table without lines that fits the terminal; the first `left` columns are words."""
    table = FittingTable(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.heading = title
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    return table
