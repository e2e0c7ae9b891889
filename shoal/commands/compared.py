"""Strategies beside each other: which ones, and the tables of `shoal compare` and `rehearse`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from rich.table import Table

from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands.launching import strategy_for
from shoal.commands.output import plain_table
from shoal.errors import BadInput
from shoal.observe.comparison import RunOutcome
from shoal.strategy.strategy import as_strategy
from shoal.strategy.terms import TERMS

# where faults are asked for and no strategies: one for each way to wait, or not to
WAYS_TO_WAIT = (
    *("ddp", "localsgd(every=8)", 'gossip(graph="ring")', 'gossip(graph="ring", mode="async")'),
    *("hogwild(momentum=True)", "ps", "ps(quorum=0.75)", "ps(staleness=2)", 'ps(mode="async")'),
)
_APART = 1.2  # how much faster than the slowest worker another one may be to be no news
INTERRUPTED = "interrupted"  # why a run has no result after a signal


def strategies_of(given: Sequence[str] | None, workers: int) -> list[str]:
    """Those that are given, or one of each kind, and the options that matter most."""
    if given:
        others = [text for text in given if as_strategy(text) != as_strategy("single")]
        return list(dict.fromkeys(str(strategy_for(text, workers)) for text in others))
    names = []
    for text in (text for term in TERMS.values() for text in term.compared):
        with suppress(BadInput):  # not built, or not for this number of workers
            names.append(str(strategy_for(text, workers)))
    return names


def target_loss_of(text: str | None) -> float | None:
    name, _, number = (text or "loss=0").partition("=")
    with suppress(ValueError):
        if name == "loss" and math.isfinite(float(number)):
            return None if text is None else float(number)
    raise BadInput(f"--until takes a loss, such as loss=0.2, not {str(text)[:40]!r}")


def speed_table(outcomes: Sequence[RunOutcome], title: str) -> Table:
    """Speeds and traffic; columns that say nothing of any strategy are left out."""
    columns: dict[str, Callable[[RunOutcome], str | None]] = {
        "steps/s": _speed,
        "CPU a\nstep": lambda o: _shown(o.cpu_s_per_step, show_seconds),
        "speed-\nup": lambda o: _shown(o.speed_up, "{:.2f}×".format),
        "spread": lambda o: (
            f"{min(o.speed_ups):.2f}–{max(o.speed_ups):.2f}" if len(o.speed_ups) > 1 else None
        ),
        "time by\nfaults": lambda o: _shown(o.slowed, "{:.2f}×".format),
        "sent a\nstep": lambda o: _shown(o.bytes_sent, lambda n: show_bytes(n / max(1, o.steps))),
        "idle": lambda o: _shown(o.computing, lambda c: f"{1 - c - (o.injected or 0.0):.0%}"),
    }
    found = {head: [cell(o) for o in outcomes] for head, cell in columns.items()}
    shown = {head: cells for head, cells in found.items() if any(cells)}
    rows = [
        [one.strategy, *(cells[n] or "–" for cells in shown.values())]
        for n, one in enumerate(outcomes)
    ]
    table = plain_table(title, ["strategy", *shown], rows, left=1)
    table.columns[0].overflow = "fold"
    return table


def result_table(outcomes: Sequence[RunOutcome], until: str | None) -> Table:
    """What the runs came to, and what became of what their workers sent."""
    names = [list(o.evaluated) for o in outcomes if o.evaluated]
    metric = next((name for group in names for name in group if name != "loss"), None)
    tested = any("loss" in group for group in names)
    heads = ["strategy", "test\nloss" if tested else "loss"]
    heads += [] if metric is None else [metric or "metric"]
    heads += [] if until is None else [f"seconds to\n{until}", "steps"]
    late: dict[str, Callable[[RunOutcome], str | None]] = {
        "drop-\nped": lambda o: _shown(o.dropped, "{:,}".format),
        "skip-\nped": lambda o: _shown(o.skipped, "{:,}".format),
        "stale": lambda o: _shown(o.staleness, "{:.1f}".format),
    }
    late = {head: cell for head, cell in late.items() if any(map(cell, outcomes))}
    last = ["against single"] if any(one.is_single for one in outcomes) else []
    rows = []
    for one in outcomes:
        loss = "nan" if one.ran and one.loss is None and one.steps else None
        row = [one.strategy, _shown(one.loss, "{:.4f}".format) or loss]
        if metric is not None:
            form = "{:.1%}" if metric == "accuracy" else "{:.4g}"
            row.append(_shown((one.evaluated or {}).get(metric), form.format))
        if until is not None:
            row += [_shown(one.until_s, _seconds), _shown(one.until_steps, "{:,}".format)]
        row += [cell(one) for cell in late.values()]
        rows.append([*(cell or "–" for cell in row), *([_verdict(one)] if last else [])])
    table = plain_table("", [*heads, *late, *last], rows, left=1)
    table.columns[-1].justify = "left" if last else "right"
    table.columns[0].overflow = "fold"
    return table


def _speed(one: RunOutcome) -> str | None:
    """The mean of the workers, with the slowest and the fastest where they are far apart."""
    mean = _shown(one.steps_per_s, "{:,.1f}".format)
    low, high = one.steps_per_s_between or (0.0, 0.0)
    return f"{mean}\n{low:,.1f}–{high:,.1f}" if mean and high > _APART * low else mean


def _shown(value: float | None, show: Callable[[float], str]) -> str | None:
    return None if value is None else show(value)


def _seconds(number: float) -> str:
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def _verdict(one: RunOutcome) -> str:
    if not one.ran:
        is_failed = one.failed != INTERRUPTED
        return "refused" if one.refused else "failed" if is_failed else INTERRUPTED
    return "" if one.workers == 1 else one.against_single
