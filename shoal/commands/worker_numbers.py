"""`-n 2,4,8`: one number of workers, or several, and a table of predictions over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands.output import plain_table
from shoal.errors import BadInput
from shoal.plan.explain import bound_words
from shoal.plan.prediction import Prediction

_MOST_WORKERS = 10_000_000
WorkerNumbers = Annotated[
    str,
    typer.Option(
        "--workers", "-n", metavar="INTEGERS", help="Number of workers, or several: 2,4,8."
    ),
]


def worker_numbers(text: str) -> list[int]:
    """The numbers of a list such as 2,4,8."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and word.isascii() for word in words):
        raise BadInput(f"-n takes a number of workers, or several such as 2,4,8, not {text!r}")
    numbers = [int(word) if len(word) < 12 else _MOST_WORKERS + 1 for word in words]
    for number in numbers:
        if not 1 <= number <= _MOST_WORKERS:
            raise BadInput(f"-n {text}: a number of workers is from 1 to {_MOST_WORKERS:,}")
    return list(dict.fromkeys(numbers))


def scaling_table(predictions: Sequence[Prediction]) -> Table:
    """One row a number of workers; the speed-up is over the first of them."""
    heads = [
        "workers",
        "step",
        "samples/s",
        "speed-up",
        "efficiency",
        "MFU",
        "memory",
        "most of it",
    ]
    table = plain_table("", heads)
    table.columns[-1].justify = "left"
    for one in predictions:
        table.add_row(*_cells(one, predictions[0]))
    return table


def _cells(one: Prediction, first: Prediction) -> list[str]:
    speedup = one.samples_per_s / first.samples_per_s
    share = one.largest.seconds / one.step_s
    return [
        str(one.workers),
        show_seconds(one.step_s),
        f"{one.samples_per_s:.3g}",
        f"{speedup:.2f}",
        f"{speedup * first.workers / one.workers:.0%}",
        "" if one.mfu is None else f"{one.mfu:.1%}",
        show_bytes(one.memory.total) + ("" if one.fits else " (too large)"),
        f"{one.largest.name} {share:.0%}, {bound_words(one.largest)}",
    ]
