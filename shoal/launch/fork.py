"""Workers as forks of this process, for interactive sessions, which have no script to start again.

A forked worker must not use threads that the session had started, so it computes on one thread.
Servers are processes of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.coordinator import RunCoordinator, coordinated
from shoal.launch.failures import (
    ProcessFailure,
    first_failure,
    launch_error,
    read_failure,
    report_failure,
)
from shoal.launch.lost_servers import ServerPolicy
from shoal.launch.lost_workers import LossPolicy, Tolerance
from shoal.launch.process_config import (
    SERVER_COMMAND,
    SINGLE_COPY,
    Replication,
    server_config,
    worker_config,
)
from shoal.launch.processes import ProcessExit
from shoal.launch.running import RunFacts, enter_run
from shoal.launch.worker_losses import losses_at_end
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
    replication: Replication = SINGLE_COPY


def fork(spec: ForkSpec) -> None:
    """Run the function in forked processes to their end; raises for the first that failed."""
    context = multiprocessing.get_context("fork")
    with new_run_dir() as run_dir:
        processes = [
            context.Process(target=_child, args=(spec, rank, run_dir, os.getpid()))
            for rank in range(spec.workers)
        ]
        policy = LossPolicy(run_dir, spec.workers, spec.tolerance, _say)
        with (
            coordinated(spec.replication, spec.servers, spec.config, run_dir, _say) as coordinator,
            ForkServers(replace(spec, config=coordinator.config), run_dir, coordinator) as servers,
        ):
            try:
                for process in processes:
                    process.start()
                name = _enter(spec, run_dir, processes)
                coordinator.watch()
                failures = _wait_for_all(processes, servers, run_dir, policy)
            finally:
                run_dir.mark_ending()
                _end(processes)
        if failures and run_dir.is_preempted():
            raise ShoalError(f"the run {name} was stopped by shoal stop")
        if failures:
            raise launch_error(first_failure(failures))
        for sentence in losses_at_end(
            policy.lost, spec.workers, run_dir.read_reports(spec.workers)
        ):
            _say(sentence)


def _enter(spec: ForkSpec, run_dir: RunDir, processes: Sequence[Process]) -> str:
    """Make the run known to `shoal ps` and `shoal stop`."""
    hosts = [socket.gethostname()] * spec.workers
    pids = [process.pid or 0 for process in processes]
    strategy = spec.config.strategy or "single"
    name = enter_run(run_dir, RunFacts(strategy, spec.workers, spec.servers, (), hosts, pids))
    _say(f"run {name} (shoal stop {name} ends it)")
    return name


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


class ForkServers:
    """Servers while the block runs; their output is kept in case one fails."""

    def __init__(self, spec: ForkSpec, run_dir: RunDir, coordinator: RunCoordinator):
        self._spec = spec
        self._run_dir = run_dir
        self._coordinator = coordinator
        self._policy = ServerPolicy(
            spec.servers,
            spec.replication,
            _say,
            coordinator.members,
            spec.config.server_checkpoint,
        )
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ForkServers:
        try:
            for index in range(self._spec.servers):
                self._start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._processes.values():
            server.terminate()
        deadline = time.monotonic() + GRACE_S
        for server in self._processes.values():
            try:
                server.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def __bool__(self) -> bool:
        return bool(self._processes)

    def failed(self, known: list[ProcessFailure]) -> list[ProcessFailure]:
        """Those that have exited and end the run; others are replaced by a new process."""
        reported = {failure.rank for failure in known if failure.role == "server"}
        ended = [i for i, s in self._processes.items() if i not in reported and s.poll()]
        now_ns = time.monotonic_ns()
        exits = [ProcessExit(i, self._processes[i].returncode, now_ns, "server") for i in ended]
        for exit in exits:
            self._policy.note(exit)
        return [failure for exit in exits for failure in self._judged(exit)]

    def _judged(self, exit: ProcessExit) -> list[ProcessFailure]:
        index = exit.rank
        if not self._policy.survives(exit):
            tail = _tail(self._run_dir, index)
            failure = ProcessFailure(index, exit.returncode, exit.noticed_ns, None, tail, "server")
            return [replace(failure, sentence=self._policy.sentence(index))]
        self._coordinator.server_exited(index, self._processes[index].pid)
        if self._policy.replaces(exit):
            self._run_dir.remove_socket(index)
            self._start(index, failpoints=())
        else:
            del self._processes[index]
        return []

    def _start(self, index: int, **changes: Any) -> None:
        spec = self._spec
        config = server_config(
            replace(spec.config, **changes),
            self._run_dir,
            index,
            spec.workers,
            spec.servers,
            spec.replication,
        )
        with self._run_dir.server_log(index).open("wb") as log:
            process = subprocess.Popen(
                spec.server_command,
                env=config.to_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[index] = process
        self._run_dir.note_server_pid(index, process.pid)
        self._policy.started(index, process.pid)


def _wait_for_all(
    processes: list[Process],
    servers: ForkServers,
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
        failed += servers.failed(failed)
        if failed and not wait(list(running), timeout=0.3):
            break
    if not failed and not any(failure.returncode == 0 for failure in exited):
        return exited
    return failed


def _exit_of(rank: int, returncode: int, run_dir: RunDir) -> ProcessFailure:
    return ProcessFailure(rank, returncode, time.monotonic_ns(), read_failure(run_dir, rank))


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
