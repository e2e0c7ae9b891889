"""Workers as forks of this process, for interactive sessions, which have no script to start again.

A forked worker must not use threads that the session had started, so it computes on one thread.
Servers are processes of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from shoal.launch.failures import (
    ProcessFailure,
    first_failure,
    launch_error,
    read_failure,
    report_failure,
)
from shoal.launch.lost_workers import LossPolicy, Tolerance, summarize_losses
from shoal.launch.process_config import SERVER_COMMAND, server_config, worker_config
from shoal.launch.processes import ProcessExit
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import die_with_session
from shoal.runtime.run_dir import RunDir, new_run_dir

GRACE_S = 2.0
POLL_S = 0.2  # how often servers are polled
TAIL_BYTES = 4096

Process = multiprocessing.context.ForkProcess


@dataclass(frozen=True)
class ForkSpec:
    """What to run: a function in forked workers, servers, and the losses that are allowed."""

    body: Callable[[RunConfig], object]
    workers: int
    config: RunConfig
    servers: int = 0
    server_command: Sequence[str] = SERVER_COMMAND
    tolerance: Tolerance | None = None


def fork(spec: ForkSpec) -> None:
    """Run the function in forked processes to their end; raises for the first that failed."""
    context = multiprocessing.get_context("fork")
    with new_run_dir() as run_dir:
        processes = [
            context.Process(target=_child, args=(spec, rank, run_dir, os.getpid()))
            for rank in range(spec.workers)
        ]
        policy = LossPolicy(run_dir, spec.workers, spec.tolerance, _say)
        with _servers(spec, run_dir) as servers:
            try:
                for process in processes:
                    process.start()
                failures = _wait_for_all(processes, servers, run_dir, policy)
            finally:
                run_dir.mark_ending()
                _end(processes)
        if failures:
            raise launch_error(first_failure(failures))
        if policy.lost:
            _say(summarize_losses(policy.lost, spec.workers))


def _say(line: str) -> None:
    print(f"shoal: {line}", file=sys.stderr, flush=True)


def _child(spec: ForkSpec, rank: int, run_dir: RunDir, session_pid: int) -> None:
    die_with_session(session_pid)
    config = worker_config(spec.config, run_dir, rank, spec.workers, spec.servers)
    config.export()
    try:
        spec.body(config)
    except Exception as error:
        report_failure(run_dir, rank, error)
        sys.exit(1)


@contextmanager
def _servers(spec: ForkSpec, run_dir: RunDir) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers while the block runs; their output is kept in case one fails."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(spec.servers):
            started.append(_start_server(spec, run_dir, index))
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


def _start_server(spec: ForkSpec, run_dir: RunDir, index: int) -> subprocess.Popen[bytes]:
    config = server_config(spec.config, run_dir, index, spec.workers, spec.servers)
    with run_dir.server_log(index).open("wb") as log:
        return subprocess.Popen(
            spec.server_command,
            env=config.to_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_for_all(
    processes: list[Process],
    servers: list[subprocess.Popen[bytes]],
    run_dir: RunDir,
    policy: LossPolicy,
) -> list[ProcessFailure]:
    """Until all have exited, or one has failed and the others have had 0.3 s."""
    running: dict[Any, int] = {p.sentinel: rank for rank, p in enumerate(processes)}
    exited: list[ProcessFailure] = []
    failed: list[ProcessFailure] = []
    while running:
        for sentinel in wait(list(running), timeout=POLL_S if servers or failed else None):
            rank = running.pop(sentinel)
            processes[rank].join()
            failure = _exit_of(rank, processes[rank].exitcode or 0, run_dir)
            exited.append(failure)
            if not policy.survives(ProcessExit(rank, failure.returncode, failure.noticed_ns)):
                failed.append(failure)
        failed += _failed_servers(servers, run_dir, failed)
        if failed and not wait(list(running), timeout=0.3):
            break
    if not failed and not any(failure.returncode == 0 for failure in exited):
        return exited
    return failed


def _exit_of(rank: int, returncode: int, run_dir: RunDir) -> ProcessFailure:
    return ProcessFailure(rank, returncode, time.monotonic_ns(), read_failure(run_dir, rank))


def _failed_servers(
    servers: list[subprocess.Popen[bytes]], run_dir: RunDir, known: list[ProcessFailure]
) -> list[ProcessFailure]:
    reported = {failure.rank for failure in known if failure.role == "server"}
    return [
        ProcessFailure(
            index, server.returncode, time.monotonic_ns(), None, _tail(run_dir, index), "server"
        )
        for index, server in enumerate(servers)
        if index not in reported and server.poll()
    ]


def _tail(run_dir: RunDir, index: int) -> str:
    log = run_dir.server_log(index).read_bytes()
    return log[-TAIL_BYTES:].decode("utf-8", "backslashreplace")


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
