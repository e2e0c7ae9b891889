"""Workers as forks of this process: for interactive sessions, which have no script to start again.

A forked worker shares nothing with the session but what the session had loaded; it must not use
threads that the session had started, so it computes on one. Servers are processes of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shoal.launch.failures import Death, as_error, first_failure, read_report, report_failure
from shoal.launch.lost_workers import Losses, Tolerance, who_finished
from shoal.launch.processes import Exit
from shoal.launch.run_dir import (
    SERVER_COMMAND,
    run_directory,
    server_environment,
    worker_variables,
)

GRACE_S = 2.0
LOOK_S = 0.2  # how often servers are looked at
TAIL_BYTES = 4096

Process = multiprocessing.context.ForkProcess


def fork(
    body: Callable[[], object],
    workers: int,
    env: Mapping[str, str],
    *,
    servers: int = 0,
    server_command: Sequence[str] = SERVER_COMMAND,
    tolerance: Tolerance | None = None,
) -> None:
    """Run `body` in `workers` forked processes to their end; raises for the first that failed."""
    context = multiprocessing.get_context("fork")
    with run_directory() as run_dir:
        processes = [
            context.Process(target=_child, args=(body, rank, workers, servers, run_dir, dict(env)))
            for rank in range(workers)
        ]
        losses = Losses(run_dir, workers, tolerance, _say)
        deaths: list[Death] = []
        commands = [
            (
                server_command,
                server_environment({**os.environ, **env}, run_dir, i, workers, servers),
            )
            for i in range(servers)
        ]
        with _servers(commands, run_dir) as beside:
            try:
                for process in processes:
                    process.start()
                deaths = _wait_for_all(processes, beside, run_dir, losses)
            finally:
                _end(processes)
        if deaths:
            raise as_error(first_failure(deaths))
        if losses.lost:
            _say(who_finished(losses.lost, workers))


def _say(line: str) -> None:
    print(f"shoal: {line}", file=sys.stderr, flush=True)


def _child(
    body: Callable[[], object],
    rank: int,
    workers: int,
    servers: int,
    run_dir: Path,
    env: dict[str, str],
) -> None:
    os.environ.update(env)
    os.environ.update(worker_variables(run_dir, rank, workers, servers))
    try:
        body()
    except Exception as error:
        report_failure(run_dir, rank, error)
        sys.exit(1)


@contextmanager
def _servers(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], run_dir: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers while the block runs; what they print is kept for the case that one fails."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, (command, env) in enumerate(commands):
            with _log(run_dir, index).open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for server in started:
            server.terminate()
        deadline = time.monotonic() + GRACE_S
        for server in started:
            try:
                server.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for_all(
    processes: list[Process],
    servers: list[subprocess.Popen[bytes]],
    run_dir: Path,
    losses: Losses,
) -> list[Death]:
    """Until all are done, or one has failed and the others have had their grace."""
    running: dict[Any, int] = {p.sentinel: rank for rank, p in enumerate(processes)}
    ended: list[Death] = []
    failed: list[Death] = []
    while running:
        for sentinel in wait(list(running), timeout=LOOK_S if servers or failed else None):
            rank = running.pop(sentinel)
            processes[rank].join()
            death = _death(rank, processes[rank].exitcode or 0, run_dir)
            ended.append(death)
            if not losses.take(Exit(rank, death.returncode, death.noticed_ns)):
                failed.append(death)
        failed += _dead_servers(servers, run_dir, failed)
        if failed and not wait(list(running), timeout=0.3):
            break
    if not failed and not any(death.returncode == 0 for death in ended):
        return ended
    return failed


def _death(rank: int, returncode: int, run_dir: Path) -> Death:
    return Death(rank, returncode, time.monotonic_ns(), read_report(run_dir, rank))


def _dead_servers(
    servers: list[subprocess.Popen[bytes]], run_dir: Path, known: list[Death]
) -> list[Death]:
    told = {death.rank for death in known if death.role == "server"}
    return [
        Death(i, server.returncode, time.monotonic_ns(), None, _tail(run_dir, i), "server")
        for i, server in enumerate(servers)
        if i not in told and server.poll()
    ]


def _tail(run_dir: Path, index: int) -> str:
    return _log(run_dir, index).read_bytes()[-TAIL_BYTES:].decode("utf-8", "backslashreplace")


def _log(run_dir: Path, index: int) -> Path:
    return run_dir / f"server-{index}.log"


def _end(processes: list[Process]) -> None:
    alive = [process for process in processes if process.pid is not None]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
