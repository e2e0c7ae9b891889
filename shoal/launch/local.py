"""Run many copies of a command on this host, and servers beside them, and look after them.

    launch ── Crew: the workers; Crew: the servers   exits ───┐
           ── Pump: their output and progress        errors ──┼─> one queue ─> Watch
           ── Interrupts: Ctrl-C, SIGTERM, SIGHUP    signals ─┘

Signal handlers, waiting threads and the output thread only put events into the queue, so
nothing is interrupted half-way; the main thread alone decides what happens next.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import BadInput
from shoal.launch.failures import as_error, finished_workers, first_failure
from shoal.launch.lost_workers import Loss, Losses, Tolerance, who_finished
from shoal.launch.output import Lines, OnProgress, Pump, Records, Write, print_lines
from shoal.launch.processes import Crew, Role
from shoal.launch.run_dir import (
    SERVER_COMMAND,
    read_reports,
    run_directory,
    server_environment,
    worker_variables,
)
from shoal.launch.supervisor import Interrupts, Watch
from shoal.runtime.cores import cores


@dataclass(frozen=True)
class Ending:
    """How a run went that went well."""

    seconds: float
    lost: tuple[Loss, ...]
    reports: tuple[dict[str, Any] | None, ...]  # by rank, None for a worker that left none


def launch(
    command: Sequence[str],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
    servers: int = 0,
    server_command: Sequence[str] = SERVER_COMMAND,
    tolerance: Tolerance | None = None,
) -> Ending:
    """Run `workers` copies of a command to their end; every process is gone when it returns.

    Raises WorkersFailed for the first worker that failed, BadInput when that was a mistake of
    the user or nothing can be started, KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM
    and SIGHUP, and whatever `write` or `on_progress` raise; both are called from one thread.

    `servers` processes run beside the workers and are ended after them; one that fails before is
    a ServerFailed. With `tolerance` a worker that is killed, or has lost its peers, is told of
    and missed, and the others go on; one that raises another error still ends the run.

    `env` stands for os.environ; `threads` for the OMP_NUM_THREADS in it.
    """
    base = dict(os.environ if env is None else env)
    _check(command, workers, base)
    base["OMP_NUM_THREADS"] = str(threads or base.get("OMP_NUM_THREADS") or _share(workers))
    watch = Watch(workers, servers)
    put = watch.events.put
    start_s = time.monotonic()
    with Interrupts(put) as interrupts, run_directory() as run_dir:
        job = _Job(command, workers, server_command, servers, base, run_dir, write, on_progress)
        with Pump(put) as pump, _own_words(pump, write) as say:
            losses = Losses(run_dir, workers, tolerance, say)
            with Crew(put, "server") as server_crew, Crew(put) as crew:
                errors = job.start(crew, server_crew, pump)
                watch.run(crew, server_crew, losses.take)
        deaths = watch.deaths(run_dir, errors)
        finished = finished_workers(run_dir)
        ending = Ending(
            time.monotonic() - start_s, tuple(losses.lost), tuple(read_reports(run_dir, workers))
        )
    interrupts.raise_first()
    if watch.broken is not None:
        raise watch.broken
    if deaths:
        raise as_error(first_failure(deaths), finished)
    if ending.lost:
        write(f"shoal: {who_finished(ending.lost, workers)}\n", True)
    return ending


def _check(command: Sequence[str], workers: int, env: Mapping[str, str]) -> None:
    if workers < 1:
        raise BadInput(f"cannot run on {workers} workers: at least 1 is needed")
    if not command:
        raise BadInput("there is no command to run")
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise BadInput(f"there is no program {command[0]!r} that can be run")
    is_python = Path(command[0]).name.startswith("python")
    if is_python and len(command) > 1 and not command[1].startswith("-"):
        script = Path(command[1])
        if not script.exists():
            raise BadInput(f"there is no script {command[1]!r} in {Path.cwd()}")


def _share(workers: int) -> int:
    """Threads for one worker: the cores that this process may use, divided."""
    return max(1, cores() // workers)


@contextmanager
def _own_words(pump: Pump, write: Write) -> Iterator[Callable[[str], None]]:
    """A way to say a line on stderr among those of the workers, by the thread that writes them."""
    pipe, own_end = os.pipe()
    pump.add(pipe, Lines(write, "shoal: ", True))

    def say(line: str) -> None:
        os.write(own_end, line.encode() + b"\n")

    try:
        yield say
    finally:
        os.close(own_end)


@dataclass(frozen=True)
class _Job:
    command: Sequence[str]
    workers: int
    server_command: Sequence[str]
    servers: int
    env: Mapping[str, str]
    run_dir: Path
    write: Write
    on_progress: OnProgress | None

    def start(self, crew: Crew, server_crew: Crew, pump: Pump) -> dict[Role, list[Lines]]:
        """Start all workers and servers; returns the stderr of each."""
        errors: dict[Role, list[Lines]] = {
            "server": [self._start_server(i, server_crew, pump) for i in range(self.servers)],
            "worker": [self._start_worker(rank, crew, pump) for rank in range(self.workers)],
        }
        pump.start()  # no thread before the last fork
        server_crew.watch()
        crew.watch()
        return errors

    def _start_server(self, index: int, crew: Crew, pump: Pump) -> Lines:
        env = server_environment(self.env, self.run_dir, index, self.workers, self.servers)
        return self._listen(f"[server {index}] ", crew.add(self.server_command, env), pump)

    def _start_worker(self, rank: int, crew: Crew, pump: Pump) -> Lines:
        prefix = f"[{rank}] " if self.workers > 1 else ""
        with self._progress_pipe(rank, pump) as pipe:
            keep = () if pipe is None else (pipe,)
            pipes = crew.add(self.command, self._environment(rank, pipe), keep)
        return self._listen(prefix, pipes, pump)

    def _listen(self, prefix: str, pipes: tuple[int, int], pump: Pump) -> Lines:
        out, err = pipes
        stderr = Lines(self.write, prefix, True)
        pump.add(out, Lines(self.write, prefix, False))
        pump.add(err, stderr)
        return stderr

    @contextmanager
    def _progress_pipe(self, rank: int, pump: Pump) -> Iterator[int | None]:
        """The worker's end of it, open while the worker is started; none but for rank 0."""
        if rank != 0 or self.on_progress is None:
            yield None
            return
        pipe, worker_end = os.pipe()
        pump.add(pipe, Records(self.on_progress))
        try:
            yield worker_end
        finally:
            os.close(worker_end)

    def _environment(self, rank: int, progress: int | None) -> dict[str, str]:
        env = {**self.env, **worker_variables(self.run_dir, rank, self.workers, self.servers)}
        env["SHOAL_LAUNCHER_PID"] = str(os.getpid())
        env["PYTHONUNBUFFERED"] = "1"
        env.pop("SHOAL_PROGRESS_FD", None)  # of a launcher above this one
        if progress is not None:
            env["SHOAL_PROGRESS_FD"] = str(progress)
        return env
