"""Run a command as many workers on this host, with servers beside them, and supervise them.

    launch ── LocalWorkers, LocalServers            exits ───┐
           ── OutputPump: their output, progress    errors ──┼─> one queue ─> Supervisor
           ── SignalEvents: Ctrl-C, SIGTERM, SIGHUP signals ─┘

Signal handlers, waiting threads and the output thread only put events into the queue. The main
thread alone decides what happens next. Workers of an interactive session are forks of it, which
print by themselves; Ctrl-C interrupts the session as any call.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.launch.here.coordinator import RunCoordinator, coordinated
from shoal.launch.here.log_files import LogFiles
from shoal.launch.here.output import (
    LineForwarder,
    OnProgress,
    OutputPump,
    Write,
    discard_lines,
    print_lines,
)
from shoal.launch.here.process_config import (
    SERVER_COMMAND,
    SINGLE_COPY,
    Replication,
    server_config,
    worker_config,
)
from shoal.launch.here.processes import Processes
from shoal.launch.here.report import RunResult
from shoal.launch.here.running import RunFacts, enter_run
from shoal.launch.here.supervisor import Event, SignalEvents, Supervisor
from shoal.launch.here.watches import StartNotice, StoppedProcesses, kept_memory, starting
from shoal.launch.losses.failures import report_failure
from shoal.launch.losses.joining import join_requests
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.launch.losses.lost_workers import LossPolicy, Tolerance
from shoal.runtime.config import RunConfig
from shoal.runtime.cores import cores
from shoal.runtime.parent_death import die_with_session
from shoal.runtime.run_dir import RunDir, new_run_dir
from shoal.runtime.wording import counted


@dataclass(frozen=True)
class LaunchSpec:
    """What to run: copies of a command, servers beside them, and the losses that are allowed.

    `body`, instead of a command: workers are forks of this process, an interactive session that
    has no script to start again.

    `threads` of each worker: default OMP_NUM_THREADS, or an equal share of the cores.
    """

    command: Sequence[str]
    workers: int
    config: RunConfig
    servers: int = 0
    server_command: Sequence[str] = SERVER_COMMAND
    tolerance: Tolerance | None = None
    threads: int | None = None
    forks: bool = False  # of this process, which has loaded torch
    replication: Replication = SINGLE_COPY
    logs: Path | None = None  # a folder for the output of every process
    appends_logs: bool = False  # this run continues one that was lost
    shows_name: bool = False  # by which `shoal stop` knows the run
    body: Callable[[RunConfig], object] | None = None

    @property
    def started(self) -> int:
        """How many workers there are at first; the others are asked for later."""
        if self.body is not None:
            return self.workers
        return min(self.workers, self.config.start or self.workers)

    def check(self) -> None:
        if self.workers < 1:
            raise BadInput(f"cannot run on {self.workers} workers: at least 1 is needed")
        if self.body is not None:
            return
        if not self.command:
            raise BadInput("there is no command to run")
        program = self.command[0]
        if shutil.which(program, path=self.config.environ.get("PATH")) is None:
            raise BadInput(f"there is no program {program!r} that can be run")
        check_script(self.command)

    def with_threads(self) -> LaunchSpec:
        """The same with OMP_NUM_THREADS in the configuration; forks compute on one thread."""
        if self.body is not None:
            return self
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
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    notice = StartNotice(write)
    signals = SignalEvents(events.put)
    with (
        LogFiles(spec.logs, spec.appends_logs) as logs,
        nullcontext() if spec.body else signals,
        new_run_dir() as run_dir,
    ):
        with (
            OutputPump(events.put) as pump,
            _messages(pump, notice.write, logs) as say,
            coordinated(spec.replication, spec.servers, spec.config, run_dir, say) as coordinator,
        ):
            name = enter(spec, run_dir, write) if spec.body is None else ""
            run = _LocalRun(
                *(replace(spec, config=coordinator.config), run_dir, pump, notice.write, logs)
            )
            supervisor = _supervisor(run, coordinator, say, events)
            with (
                LocalServers(run, events.put, coordinator, supervisor.server_policy) as servers,
                LocalWorkers(run, events.put, on_progress) as workers,
            ):
                servers.start_all()
                workers.start_all(supervisor.policy)
                if spec.body is not None:
                    name = enter(spec, run_dir, write, [pid for _, pid in workers.running()])
                pump.start()  # no thread before the last fork
                servers.watch()
                workers.watch()
                coordinator.watch()
                with _beside(run, notice, workers, servers, say, events.put):
                    supervisor.run(workers, servers)
        if spec.body is not None and supervisor.failed and run_dir.is_preempted():
            raise ShoalError(f"the run {name} was stopped by shoal stop")
        return supervisor.result(spec.workers, signals, write)


def _supervisor(
    run: _LocalRun,
    coordinator: RunCoordinator,
    say: Callable[[str], None],
    events: queue.SimpleQueue[Event],
) -> Supervisor:
    spec, config = run.spec, run.spec.config
    policy = LossPolicy(run.run_dir, spec.workers, spec.tolerance, say)
    server_policy = ServerPolicy(
        spec.servers, spec.replication, say, coordinator.members, config.server_checkpoint
    )
    counts = (spec.started, spec.servers)
    return Supervisor(run.run_dir, policy, server_policy, say, *counts, config.grace_s, events)


def enter(
    spec: LaunchSpec,
    run_dir: RunDir,
    write: Write,
    session: Sequence[int] = (),
    hosts: Sequence[str] | None = None,
) -> str:
    """Make the run known to `shoal ps` and `shoal stop`; returns its name.

    `session`: the workers' processes, where they are forks. `hosts` of the workers: default this.
    """
    strategy = spec.config.strategy or "single"
    hosts = hosts or [socket.gethostname()] * spec.workers
    counts = (spec.workers, spec.servers)
    facts = RunFacts(strategy, *counts, tuple(spec.command), tuple(hosts), tuple(session))
    name = enter_run(run_dir, facts)
    if spec.shows_name:
        write(f"shoal: run {name} (shoal stop {name} ends it)\n", True)
    return name


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
class _LocalRun:
    """What workers and servers of a run on this host have in common."""

    spec: LaunchSpec
    run_dir: RunDir
    pump: OutputPump
    write: Write
    logs: LogFiles

    def forward(self, prefix: str, pipes: tuple[int, int], role: str, rank: int) -> LineForwarder:
        """Connect the output of a process; returns its stderr."""
        out, err = pipes
        log = self.logs.of(role, rank)
        is_shown = self.spec.body is None  # a notebook sees what servers print if one fails
        write = self.write if is_shown else discard_lines
        stderr = LineForwarder(write, prefix, True, log)
        self.pump.add(out, LineForwarder(write, prefix, False, log))
        self.pump.add(err, stderr)
        return stderr


class LocalServers(Processes):
    """The servers of a run on this host."""

    def __init__(
        self,
        run: _LocalRun,
        put: Callable[[Event], None],
        coordinator: RunCoordinator,
        policy: ServerPolicy,
    ):
        super().__init__(put, "server", run.spec.forks)
        self._run = run
        self._coordinator = coordinator
        self._policy = policy
        self.stderr: list[LineForwarder] = []

    def start_all(self) -> None:
        self.stderr = [self._start_server(index) for index in range(self._run.spec.servers)]

    def start_again(self, rank: int) -> None:
        self._run.run_dir.remove_socket(rank)
        self.stderr[rank] = self._start_server(rank, again=True)

    def note_exit(self, rank: int) -> None:
        self._coordinator.server_exited(rank, self.pid_of(rank))

    def _start_server(self, index: int, again: bool = False) -> LineForwarder:
        """`again`: in the place of one that was lost."""
        spec, run_dir = self._run.spec, self._run.run_dir
        config = replace(spec.config, failpoints=()) if again else spec.config
        counts = (spec.workers, spec.servers, spec.replication)
        environ = server_config(config, run_dir, index, *counts).to_environment()
        pipes = self.start(spec.server_command, environ, rank=index if again else None)
        run_dir.note_server_pid(index, self.pid_of(index))
        self._policy.started(index, self.pid_of(index))
        return self._run.forward(f"[server {index}] ", pipes, "server", index)


class LocalWorkers(Processes):
    """The workers of a run on this host: copies of its command, or forks of this process."""

    def __init__(
        self, run: _LocalRun, put: Callable[[Event], None], on_progress: OnProgress | None
    ):
        super().__init__(put, forks=run.spec.forks)
        self._run = run
        self._on_progress = on_progress
        silent = LineForwarder(run.write, "", True)
        self.stderr = [silent] * run.spec.workers

    def start_all(self, policy: LossPolicy) -> None:
        spec = self._run.spec
        for rank in range(spec.started, spec.workers):
            policy.note_absent(rank)
        for rank in range(spec.started):
            self._start_worker(rank)

    def start_again(self, rank: int) -> None:
        self._start_worker(rank, self._run.run_dir.generation(rank))

    def _start_worker(self, rank: int, generation: int = 0) -> None:
        run, spec = self._run, self._run.spec
        config = worker_config(spec.config, run.run_dir, rank, spec.workers, spec.servers)
        if spec.body is not None:
            self.fork(_in_fork, spec.body, config, run.run_dir, os.getpid())
            return
        # rank 0 shows progress, or each that may be the first one left
        may_be_first = rank == 0 or (
            spec.tolerance is not None and spec.tolerance.shares.is_covered
        )
        with run.pump.progress_pipe(self._on_progress if may_be_first else None) as pipe:
            config = replace(
                config, launcher_pid=os.getpid(), progress_fd=pipe, generation=generation
            )
            # the same order of a set of words on every worker
            hash_seed = config.environ.get("PYTHONHASHSEED", "0")
            config = config.with_environ(PYTHONUNBUFFERED="1", PYTHONHASHSEED=hash_seed)
            inherited = () if pipe is None else (pipe,)
            again = rank if generation else None
            pipes = self.start(spec.command, config.to_environment(), inherited, again)
        prefix = f"[{rank}] " if spec.workers > 1 else ""
        self.stderr[rank] = run.forward(prefix, pipes, "rank", rank)


def _in_fork(
    body: Callable[[RunConfig], object], config: RunConfig, run_dir: RunDir, session_pid: int
) -> None:
    die_with_session(session_pid)
    config.export()
    try:
        body(config)
    except Exception as error:
        report_failure(run_dir, config.rank or 0, error)
        sys.exit(1)


def _beside(
    run: _LocalRun,
    notice: StartNotice,
    workers: LocalWorkers,
    servers: LocalServers,
    say: Callable[[str], None],
    put: Callable[[Event], None],
) -> ExitStack:
    """Threads that look at the run while it goes on."""
    spec, run_dir = run.spec, run.run_dir
    in_words = spec.replication.in_words

    def running() -> list[tuple[str, int]]:
        names = [(f"worker {rank}", pid) for rank, pid in workers.running()]
        return names + [(in_words(index), pid) for index, pid in servers.running()]

    if spec.started < spec.workers:
        now = f"started {spec.started} of {counted(spec.workers, 'worker')}"
        say(f"{now}; shoal join starts another one")
    stack = ExitStack()
    if spec.servers:  # workers wait for them, which load first
        line = starting(spec.servers, spec.started)
        stack.enter_context(notice.saying(line, say, run_dir.have_all_joined))
    takes_back = spec.config.takes_back
    stack.enter_context(join_requests(run_dir, put, takes_back and spec.body is None))
    stack.enter_context(kept_memory(run_dir, takes_back))
    stack.enter_context(StoppedProcesses(spec.config.wait, running, say).watched())
    return stack
