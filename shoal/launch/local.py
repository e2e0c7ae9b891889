"""Run a command as many workers on this host, with servers beside them, and supervise them.

    launch ── Processes: workers, servers           exits ───┐
           ── OutputPump: their output, progress    errors ──┼─> one queue ─> Supervisor
           ── SignalEvents: Ctrl-C, SIGTERM, SIGHUP signals ─┘

Signal handlers, waiting threads and the output thread only put events into the queue. The main
thread alone decides what happens next.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.launch.coordinator import coordinated
from shoal.launch.failures import first_failure, launch_error
from shoal.launch.joining import JoinRequest, join_requests
from shoal.launch.log_files import LogFiles
from shoal.launch.lost_servers import ServerPolicy
from shoal.launch.lost_workers import LossPolicy, Tolerance
from shoal.launch.output import (
    LineForwarder,
    OnProgress,
    OutputPump,
    ProgressReader,
    Write,
    print_lines,
)
from shoal.launch.process_config import (
    SERVER_COMMAND,
    SINGLE_COPY,
    Replication,
    server_config,
    worker_config,
)
from shoal.launch.processes import Forks, Processes, ProcessExit, Role
from shoal.launch.report import RunResult, say_losses
from shoal.launch.running import RunFacts, enter_run
from shoal.launch.supervisor import SignalEvents, Supervisor
from shoal.launch.watches import StartNotice, StoppedProcesses, kept_memory, starting
from shoal.runtime.config import RunConfig
from shoal.runtime.cores import cores
from shoal.runtime.run_dir import RunDir, new_run_dir
from shoal.runtime.wording import counted


@dataclass(frozen=True)
class LaunchSpec:
    """What to run: copies of a command, servers beside them, and the losses that are allowed.

    `threads` of each worker: default OMP_NUM_THREADS, or an equal share of the cores.
    """

    command: Sequence[str]
    workers: int
    config: RunConfig
    servers: int = 0
    server_command: Sequence[str] = SERVER_COMMAND
    tolerance: Tolerance | None = None
    threads: int | None = None
    forks: Forks | None = None
    replication: Replication = SINGLE_COPY
    logs: Path | None = None  # a folder for the output of every process
    appends_logs: bool = False  # this run continues one that was lost
    shows_name: bool = False  # by which `shoal stop` knows the run

    @property
    def started(self) -> int:
        """How many workers there are at first; the others are asked for later."""
        return min(self.workers, self.config.start or self.workers)

    def check(self) -> None:
        if self.workers < 1:
            raise BadInput(f"cannot run on {self.workers} workers: at least 1 is needed")
        if not self.command:
            raise BadInput("there is no command to run")
        program = self.command[0]
        if shutil.which(program, path=self.config.environ.get("PATH")) is None:
            raise BadInput(f"there is no program {program!r} that can be run")
        check_script(self.command)

    def with_threads(self) -> LaunchSpec:
        """The same with OMP_NUM_THREADS in the configuration."""
        inherited = self.config.environ.get("OMP_NUM_THREADS")
        threads = self.threads or inherited or max(1, cores() // self.workers)
        return replace(self, config=self.config.with_environ(OMP_NUM_THREADS=str(threads)))


def launch(
    spec: LaunchSpec, write: Write = print_lines, on_progress: OnProgress | None = None
) -> RunResult:
    """Run the workers to their end; no process of the run is left when it returns.

    Raises WorkersFailed for the first worker that failed, BadInput when that was a mistake of
    the user or nothing can be started, KeyboardInterrupt after Ctrl-C, SystemExit after SIGTERM
    and SIGHUP, and what `write` or `on_progress` raise; both are called from one thread.

    Servers are ended after the workers; one that fails before is a ServerFailed. With a
    tolerance, a worker that is killed or has lost its peers is reported, and the run goes on;
    one that raises another error ends the run.
    """
    spec.check()
    spec = spec.with_threads()
    supervisor = Supervisor(spec.started, spec.servers, grace_s=spec.config.grace_s)
    put = supervisor.events.put
    start_s = time.monotonic()
    notice = StartNotice(write)
    with (
        LogFiles(spec.logs, spec.appends_logs) as logs,
        SignalEvents(put) as signals,
        new_run_dir() as run_dir,
    ):
        enter(spec, run_dir, [socket.gethostname()] * spec.workers, write)
        with OutputPump(put) as pump, _messages(pump, notice.write, logs) as say:
            policy = LossPolicy(run_dir, spec.workers, spec.tolerance, say)
            with (
                coordinated(
                    spec.replication, spec.servers, spec.config, run_dir, say
                ) as coordinator,
                Processes(put, "server", spec.forks) as servers,
                Processes(put, forks=spec.forks) as workers,
            ):
                coordinated_spec = replace(spec, config=coordinator.config)
                starter = _Starter(
                    *(coordinated_spec, run_dir, pump, notice.write, on_progress, logs)
                )
                server_policy = ServerPolicy(
                    spec.servers,
                    spec.replication,
                    say,
                    coordinator.members,
                    spec.config.server_checkpoint,
                )
                for rank in range(spec.started, spec.workers):
                    policy.note_absent(rank)
                stderr = starter.start_all(workers, servers)
                for index in range(spec.servers):
                    server_policy.started(index, servers.pid_of(index))
                coordinator.watch()

                def restart(exit: ProcessExit) -> bool:
                    if not policy.restarts(exit):
                        return False
                    stderr["worker"][exit.rank] = starter.start_again(exit.rank, workers)
                    return True

                def join(request: JoinRequest) -> bool:
                    rank = policy.join(request.name)
                    if rank is not None:
                        stderr["worker"][rank] = starter.start_again(rank, workers)
                    return rank is not None

                def server_lost(index: int) -> None:
                    coordinator.server_exited(index, servers.pid_of(index))

                def start_server(index: int) -> None:
                    stderr["server"][index] = starter.start_server(index, servers, again=True)
                    server_policy.started(index, servers.pid_of(index))

                def running() -> list[tuple[str, int]]:
                    names = [(f"worker {rank}", pid) for rank, pid in workers.running()]
                    in_words = spec.replication.in_words
                    return names + [(in_words(i), pid) for i, pid in servers.running()]

                supervisor.say = say
                supervisor.restart = restart
                supervisor.join = join
                supervisor.server_policy = server_policy
                supervisor.server_lost = server_lost
                supervisor.start_server = start_server
                if spec.started < spec.workers:
                    now = f"started {spec.started} of {counted(spec.workers, 'worker')}"
                    say(f"{now}; shoal join starts another one")
                with (
                    _noticing(notice, spec, run_dir, say),
                    join_requests(run_dir, put, spec.config.takes_back),
                    kept_memory(run_dir, spec.config.takes_back),
                    StoppedProcesses(spec.config.wait, running, say).watched(),
                ):
                    supervisor.run(workers, servers, policy.survives, run_dir)
        failures = supervisor.failures(run_dir, stderr)
        finished = run_dir.finished_ranks()
        reports = run_dir.read_reports(spec.workers)
        result = RunResult(
            time.monotonic() - start_s,
            tuple(policy.lost),
            tuple(reports),
            bool(finished),
            tuple(policy.returned()),
            tuple(server_policy.lost),
            server_policy.removed,
            tuple(policy.joined()),
            policy.absent,
        )
    if supervisor.ends_by_signal(failures, finished):
        signals.raise_first()
    if supervisor.output_error is not None:
        raise supervisor.output_error
    if policy.too_few is not None:
        raise ShoalError(policy.too_few)
    if failures:
        raise launch_error(first_failure(failures), finished)
    say_losses(result, spec.workers, write)
    return result


def enter(spec: LaunchSpec, run_dir: RunDir, hosts: Sequence[str], write: Write) -> None:
    """Make the run known to `shoal ps` and `shoal stop`."""
    strategy = spec.config.strategy or "single"
    facts = RunFacts(strategy, spec.workers, spec.servers, spec.command, hosts)
    name = enter_run(run_dir, facts)
    if spec.shows_name:
        write(f"shoal: run {name} (shoal stop {name} ends it)\n", True)


def _noticing(
    notice: StartNotice, spec: LaunchSpec, run_dir: RunDir, say: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Workers wait for servers, which load first."""
    if not spec.servers:
        return nullcontext()
    return notice.saying(starting(spec.servers, spec.started), say, run_dir.have_all_joined)


def check_script(command: Sequence[str]) -> None:
    """BadInput where this host does not have the script."""
    is_python = Path(command[0]).name.startswith("python")
    has_script = is_python and len(command) > 1 and not command[1].startswith("-")
    if has_script and not Path(command[1]).exists():
        raise BadInput(f"there is no script {command[1]!r} in {Path.cwd()}")


@contextmanager
def _messages(pump: OutputPump, write: Write, logs: LogFiles) -> Iterator[Callable[[str], None]]:
    """A function for lines of the launcher, which the output thread writes to stderr."""
    pipe, write_end = os.pipe()
    pump.add(pipe, LineForwarder(write, "shoal: ", True, logs.of("launcher")))

    def say(line: str) -> None:
        os.write(write_end, line.encode() + b"\n")

    try:
        yield say
    finally:
        os.close(write_end)


@dataclass(frozen=True)
class _Starter:
    """Starts the processes of a run and connects their output."""

    spec: LaunchSpec
    run_dir: RunDir
    pump: OutputPump
    write: Write
    on_progress: OnProgress | None
    logs: LogFiles

    def start_all(self, workers: Processes, servers: Processes) -> dict[Role, list[LineForwarder]]:
        """Start all workers and servers; returns the stderr of each."""
        started = self.spec.started
        absent = range(started, self.spec.workers)
        stderr: dict[Role, list[LineForwarder]] = {
            "server": [self.start_server(i, servers) for i in range(self.spec.servers)],
            "worker": [self._start_worker(rank, workers) for rank in range(started)],
        }
        stderr["worker"] += [LineForwarder(self.write, "", True) for _ in absent]
        self.pump.start()  # no thread before the last fork
        servers.watch()
        workers.watch()
        return stderr

    def start_server(self, index: int, servers: Processes, again: bool = False) -> LineForwarder:
        """Its process; `again`: in the place of one that was lost."""
        spec = self.spec
        config = server_config(
            spec.config, self.run_dir, index, spec.workers, spec.servers, spec.replication
        )
        if again:
            config = replace(config, failpoints=())
            self.run_dir.remove_socket(index)
        rank = index if again else None
        pipes = servers.start(spec.server_command, config.to_environment(), rank=rank)
        self.run_dir.note_server_pid(index, servers.pid_of(index))
        return self._forward(f"[server {index}] ", pipes, ("server", index))

    def start_again(self, rank: int, workers: Processes) -> LineForwarder:
        """Start a worker that was lost; returns its stderr."""
        return self._start_worker(rank, workers, self.run_dir.generation(rank))

    def _start_worker(self, rank: int, workers: Processes, generation: int = 0) -> LineForwarder:
        prefix = f"[{rank}] " if self.spec.workers > 1 else ""
        with self._progress_pipe(rank) as pipe:
            inherited = () if pipe is None else (pipe,)
            config = replace(self._worker_config(rank, pipe), generation=generation)
            again = rank if generation else None
            pipes = workers.start(self.spec.command, config.to_environment(), inherited, again)
        return self._forward(prefix, pipes, ("rank", rank))

    def _worker_config(self, rank: int, progress_fd: int | None) -> RunConfig:
        spec = self.spec
        config = worker_config(spec.config, self.run_dir, rank, spec.workers, spec.servers)
        config = replace(config, launcher_pid=os.getpid(), progress_fd=progress_fd)
        # the same order of a set of words on every worker
        hash_seed = config.environ.get("PYTHONHASHSEED", "0")
        return config.with_environ(PYTHONUNBUFFERED="1", PYTHONHASHSEED=hash_seed)

    def _forward(self, prefix: str, pipes: tuple[int, int], role: tuple[str, int]) -> LineForwarder:
        out, err = pipes
        log = self.logs.of(*role)
        stderr = LineForwarder(self.write, prefix, True, log)
        self.pump.add(out, LineForwarder(self.write, prefix, False, log))
        self.pump.add(err, stderr)
        return stderr

    @contextmanager
    def _progress_pipe(self, rank: int) -> Iterator[int | None]:
        """The worker's end, open while the worker is started.

        Rank 0 alone has one, or each that may be the first one left.
        """
        tolerance = self.spec.tolerance
        may_be_first = rank == 0 or (tolerance is not None and tolerance.shares.is_covered)
        if not may_be_first or self.on_progress is None:
            yield None
            return
        pipe, worker_end = os.pipe()
        self.pump.add(pipe, ProgressReader(self.on_progress))
        try:
            yield worker_end
        finally:
            os.close(worker_end)
