"""Run many copies of a command on this host and look after them.

    launch ── Crew: the worker processes             exits ───┐
           ── Pump: their output and progress        errors ──┼─> one queue ─> Watch
           ── Interrupts: Ctrl-C, SIGTERM, SIGHUP    signals ─┘

Signal handlers, waiting threads and the output thread only put events into the queue, so
nothing is interrupted half-way; the main thread alone decides what happens next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput
from shoal.launch.crew import Crew
from shoal.launch.environment import Placement, shoal_environment
from shoal.launch.failures import as_error, finished_workers, first_failure
from shoal.launch.output import Lines, OnProgress, Pump, Records, Write, print_lines
from shoal.launch.watch import Interrupts, Watch


def launch(
    command: Sequence[str],
    workers: int,
    *,
    env: Mapping[str, str] | None = None,
    threads: int | None = None,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
) -> None:
    """Run `workers` copies of a command to their end; every process is gone when it returns.

    Raises WorkersFailed for the first worker that failed, BadInput when that was a mistake of
    the user or nothing can be started, KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM
    and SIGHUP, and whatever `write` or `on_progress` raise; both are called from one thread.

    `env` stands for os.environ; `threads` for the OMP_NUM_THREADS in it.
    """
    base = dict(os.environ if env is None else env)
    _check(command, workers, base)
    base["OMP_NUM_THREADS"] = str(threads or base.get("OMP_NUM_THREADS") or _share(workers))
    watch = Watch(workers)
    with Interrupts(watch.events.put) as interrupts, _run_directory() as run_dir:
        job = _Job(command, workers, base, run_dir, write, on_progress)
        with Pump(watch.events.put) as pump, Crew(watch.events.put) as crew:
            errors = job.start(crew, pump)
            watch.run(crew)
        deaths = watch.deaths(run_dir, errors)
        finished = finished_workers(run_dir)
    interrupts.raise_first()
    if watch.broken is not None:
        raise watch.broken
    if deaths:
        raise as_error(first_failure(deaths), finished)


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
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)


@contextmanager
def _run_directory() -> Iterator[Path]:
    """For the rendezvous file and the reports of failures; only this user can look into it."""
    path = tempfile.mkdtemp(prefix="shoal-run-")
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Job:
    command: Sequence[str]
    workers: int
    env: Mapping[str, str]
    run_dir: Path
    write: Write
    on_progress: OnProgress | None

    def start(self, crew: Crew, pump: Pump) -> list[Lines]:
        """Start all workers; returns the stderr of each."""
        errors = [self._start_worker(rank, crew, pump) for rank in range(self.workers)]
        pump.start()  # no thread before the last fork
        crew.watch()
        return errors

    def _start_worker(self, rank: int, crew: Crew, pump: Pump) -> Lines:
        prefix = f"[{rank}] " if self.workers > 1 else ""
        stdout, stderr = Lines(self.write, prefix, False), Lines(self.write, prefix, True)
        with self._progress_pipe(rank, pump) as pipe:
            keep = () if pipe is None else (pipe,)
            out, err = crew.add(self.command, self._environment(rank, pipe), keep)
        pump.add(out, stdout)
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
        meeting = f"file://{self.run_dir}/store"
        place = Placement("shoal", rank, self.workers, rank, self.workers, meeting)
        env = {**self.env, **shoal_environment(place)}
        env["SHOAL_RUN_DIR"] = str(self.run_dir)
        env["SHOAL_LAUNCHER_PID"] = str(os.getpid())
        env["PYTHONUNBUFFERED"] = "1"
        env.pop("SHOAL_PROGRESS_FD", None)  # of a launcher above this one
        if progress is not None:
            env["SHOAL_PROGRESS_FD"] = str(progress)
        return env
