"""Workers as forks of this process: for interactive sessions, which have no script to start again.

A forked worker shares nothing with the session but what the session had loaded; it must not use
threads that the session had started, so it computes on one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.launch.environment import Placement, shoal_environment
from shoal.launch.failures import Death, as_error, first_failure, read_report, report_failure

GRACE_S = 2.0


def fork(body: Callable[[], object], workers: int, env: Mapping[str, str]) -> None:
    """Run `body` in `workers` forked processes to their end; raises for the first that failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as run_dir:
        processes = [
            context.Process(target=_child, args=(body, rank, workers, run_dir, dict(env)))
            for rank in range(workers)
        ]
        deaths: list[Death] = []
        try:
            for process in processes:
                process.start()
            deaths = _wait_for_all(processes, Path(run_dir))
        finally:
            _end(processes)
        if deaths:
            raise as_error(first_failure(deaths))


def _child(
    body: Callable[[], object], rank: int, workers: int, run_dir: str, env: dict[str, str]
) -> None:
    place = Placement("shoal", rank, workers, rank, workers, f"file://{run_dir}/store")
    os.environ.update(env)
    os.environ.update(shoal_environment(place))
    os.environ["SHOAL_RUN_DIR"] = run_dir
    try:
        body()
    except Exception as error:
        report_failure(run_dir, rank, error)
        sys.exit(1)


def _wait_for_all(
    processes: list[multiprocessing.context.ForkProcess], run_dir: Path
) -> list[Death]:
    """Until all are done, or one has failed and the others have had their grace."""
    running: dict[Any, int] = {p.sentinel: rank for rank, p in enumerate(processes)}
    deaths: list[Death] = []
    while running:
        for sentinel in wait(list(running), timeout=GRACE_S if deaths else None):
            rank = running.pop(sentinel)
            processes[rank].join()
            code = processes[rank].exitcode or 0
            if code:
                report = read_report(run_dir, rank)
                deaths.append(Death(rank, code, time.monotonic_ns(), report))
        if deaths and not wait(list(running), timeout=0.3):
            break
    return deaths


def _end(processes: list[multiprocessing.context.ForkProcess]) -> None:
    alive = [process for process in processes if process.pid is not None]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
