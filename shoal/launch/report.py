"""The account of a run: what its workers have reported, as one document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.launch.local import Ending


def account(strategy: str, workers: int, ending: Ending) -> dict[str, Any]:
    """For machines.

    `steps` is that of the worker that made most of them, `seconds` the whole run with its
    start, `samples_per_s` what all workers together computed, each without the first fifth of its
    steps. `ranks` are the workers' own reports, null where one was lost.
    """
    there = [report for report in ending.reports if report is not None]
    rates = [r["samples_per_s"] for r in there if isinstance(r.get("samples_per_s"), float)]
    return {
        "strategy": strategy,
        "workers": workers,
        "steps": max((r["steps"] for r in there if isinstance(r.get("steps"), int)), default=0),
        "seconds": ending.seconds,
        "samples_per_s": sum(rates) if rates else None,
        "lost": [asdict(loss) for loss in ending.lost],
        "ranks": list(ending.reports),
    }
