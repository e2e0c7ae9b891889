"""How a run that succeeded has ended: in sentences, and as one JSON document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.launch.here.output import Write
from shoal.launch.losses.loss_report import LostWorker, losses_at_end, steps_of
from shoal.launch.losses.lost_servers import LostServer, summarize_server_losses, without_service_s


@dataclass(frozen=True)
class RunResult:
    """A run that succeeded."""

    seconds: float
    lost: tuple[LostWorker, ...]
    reports: tuple[dict[str, Any] | None, ...]  # by rank; None for a worker without a report
    has_trained: bool = True  # a worker has come to the end of shoal.run
    returned: tuple[LostWorker, ...] = ()
    lost_servers: tuple[LostServer, ...] = ()
    servers_removed: int = 0  # from their chains, while they lived; they come back
    joined: tuple[LostWorker, ...] = ()
    absent: tuple[int, ...] = ()  # workers that took no part, and were not lost


def say_losses(result: RunResult, workers: int, write: Write) -> None:
    """What was lost, and what came back."""
    joined = [worker for worker in result.joined if not worker.came_too_late]  # those were named
    sentences = [worker.in_words() for worker in (*result.returned, *joined)]
    removed = result.servers_removed
    if result.lost_servers or removed:
        sentences.append(summarize_server_losses(result.lost_servers, removed, result.reports))
    sentences += losses_at_end(result.lost, workers, result.reports, result.absent)
    for sentence in sentences:
        write(f"shoal: {sentence}\n", True)


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
