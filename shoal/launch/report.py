"""The report of a run: what its workers have reported, as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.launch.local import RunResult
from shoal.launch.lost_servers import without_service_s
from shoal.launch.worker_losses import steps_of


def run_report(strategy: str, workers: int, result: RunResult) -> dict[str, Any]:
    """The document that `shoal run --report` writes.

    `steps` is the largest number of steps of a worker, `seconds` the time of the run with its
    start. `samples_per_s` adds up all workers, each without the first fifth of its steps.
    `without_service_s` is how long the worker that waited longest got no service of a shard of
    servers with replicas. `ranks` holds the reports of the workers, null for one that was lost.
    """
    reports = [report for report in result.reports if report is not None]
    steps = steps_of(reports)
    rates = [r["samples_per_s"] for r in reports if isinstance(r.get("samples_per_s"), float)]
    return {
        "strategy": strategy,
        "workers": workers,
        "steps": steps,
        "seconds": result.seconds,
        "samples_per_s": sum(rates) if rates else None,
        "lost": [lost.document(steps) for lost in result.lost],
        "came_back": [back.document() for back in result.returned if back.away_s is not None],
        "joined": [joined.document() for joined in result.joined],
        "absent": list(result.absent),
        "servers_lost": [asdict(lost) for lost in result.lost_servers],
        "without_service_s": without_service_s(result.reports),
        "ranks": list(result.reports),
    }
