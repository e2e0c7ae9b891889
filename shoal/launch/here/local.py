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
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.launch.here import output
from shoal.launch.here.coordinator import RunCoordinator, coordinated
from shoal.launch.here.process_config import SERVER_COMMAND, SINGLE_COPY, Replication
from shoal.launch.here.processes import Processes, ProcessExit
from shoal.launch.here.running import RunFacts, enter_run, join_requests
from shoal.launch.here.supervisor import Event, SignalEvents, Supervisor
from shoal.launch.here.template import Template
from shoal.launch.here.watches import SILENT_S, kept_memory, noticing_stopped, start_notice
from shoal.launch.losses.failures import report_failure
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.launch.losses.lost_workers import LossPolicy, RunResult, Tolerance
from shoal.runtime.config import RunConfig
from shoal.runtime.memory_limit import cores, threads_of
from shoal.runtime.parent_death import die_with
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
    template: Template | None = None  # of workers, where there is one already
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


def launch(
    spec: LaunchSpec,
    write: output.Write = output.print_lines,
    on_progress: output.OnProgress | None = None,
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
    if spec.body is None:  # forks compute on one thread
        inherited = spec.config.environ.get("OMP_NUM_THREADS")
        threads = spec.threads or inherited or max(1, cores() // spec.workers)
        spec = replace(spec, config=spec.config.with_environ(OMP_NUM_THREADS=str(threads)))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with ExitStack() as stack:
        if spec.template is None and spec.body is None and spec.workers > 1:
            kept = spec.config.takes_back
            spec = replace(
                spec, template=stack.enter_context(template_of(spec.command, spec.config, kept))
            )
        logs = stack.enter_context(output.LogFiles(spec.logs, spec.appends_logs))
        template = spec.template

        def put_signal(event: Event) -> None:
            events.put(event)
            if template is not None:
                template.cancel()

        signals = SignalEvents(put_signal)
        stack.enter_context(nullcontext() if spec.body else signals)
        run_dir = stack.enter_context(new_run_dir())
        with output.OutputPump(events.put) as pump:
            run = Run(spec, run_dir, events, write, logs, pump.sink)
            supervisor, name = _run(run, pump, on_progress)
        if spec.body is not None and supervisor.failed and run_dir.preempted.exists():
            raise ShoalError(f"the run {name} was stopped by shoal stop")
        return supervisor.result(spec.workers, signals, write)


def template_of(
    command: Sequence[str], config: RunConfig, is_kept: bool
) -> AbstractContextManager[Template | None]:
    """A process that has loaded what workers of this command need; None where they are spawned."""
    is_python = command[0] == sys.executable and len(command) > 1
    if config.start_method != "fork" or not is_python:
        return nullcontext()
    return Template(command, _of_worker(config), is_kept)


@dataclass(frozen=True)
class Run:
    """A run that goes on, as its launcher has it."""

    spec: LaunchSpec
    run_dir: RunDir
    events: queue.SimpleQueue[Event]
    write: output.Write
    logs: output.LogFiles
    sink: output.OutputSink

    def __post_init__(self) -> None:
        self.logs.of("launcher")  # it is there from the start

    def say(self, line: str) -> None:
        """A line of the launcher."""
        _, launcher = self.streams("shoal: ", "launcher")
        self.sink.call(lambda: launcher.feed(f"{line}\n".encode()))

    def streams(self, prefix: str, role: str, rank: int | None = None) -> output.Streams:
        """Of one process. A notebook sees what servers print if one fails."""
        write = self.write if self.spec.body is None or role == "launcher" else output.discard_lines
        log = self.logs.of(role, rank)
        return output.LineForwarder(write, prefix, False, log), output.LineForwarder(
            write, prefix, True, log
        )

    def server_config(self, config: RunConfig, index: int) -> RunConfig:
        """A server knows the number of workers, and has no rank itself."""
        spec = self.spec
        copied = self.spec.replication
        role = replace(config.server, index=index, replicas=copied.replicas)
        server = replace(
            config,
            rank=None,
            size=spec.workers,
            local_rank=None,
            local_size=None,
            rendezvous=None,
            run_dir=self.run_dir,
            servers=spec.servers,
            server=replace(role, consistency=copied.consistency),
            launcher_pid=os.getpid(),
            progress_fd=None,
        )
        return server.with_environ(**threads_of(spec.servers), PYTHONUNBUFFERED="1")

    def supervisor(
        self, servers: ServerPolicy, on_progress: output.OnProgress | None
    ) -> Supervisor:
        spec = self.spec

        def note_state(rank: int, state: str) -> None:
            if on_progress is not None:
                show = on_progress
                record = {"rank": rank, "state": state}
                self.sink.call(lambda: show(record))

        def is_planned(exit: ProcessExit) -> bool:
            name = str(exit.rank) if exit.role == "worker" else f"server:{exit.rank}"
            return any(text.startswith(f"{name}@") for text in spec.config.kill)

        policy = LossPolicy(self.run_dir, spec.workers, spec.tolerance, self.say, is_planned)
        return Supervisor(
            self.run_dir,
            policy,
            servers,
            self.say,
            spec.started,
            spec.servers,
            spec.config.grace_s,
            self.events,
            note_state,
        )


def _run(
    run: Run, pump: output.OutputPump, on_progress: output.OnProgress | None
) -> tuple[Supervisor, str]:
    """Start all processes and wait for their end; the name of the run."""
    spec = run.spec
    run_dir = run.run_dir
    begun_s = time.monotonic()

    def say_before_end(line: str) -> None:
        if not run_dir.ending.exists():  # then servers leave because they are ended
            run.say(line)

    with coordinated(spec.replication, spec.config, run_dir, run.say) as coordinator:
        name = enter(spec, run_dir, run.write) if spec.body is None else ""
        run = replace(run, spec=replace(spec, config=coordinator.config))
        saved = spec.config.server_checkpoint
        policy = ServerPolicy(spec.servers, spec.replication, say_before_end, saved)
        supervisor = run.supervisor(policy, on_progress)
        with (
            LocalServers(run, pump, coordinator, policy) as servers,
            LocalWorkers(run, pump, on_progress) as workers,
        ):
            servers.start_all()
            workers.start_all(supervisor.policy)
            if spec.body is not None:
                name = enter(spec, run_dir, run.write, [pid for _, pid in workers.running()])
            pump.start()  # no thread before the last fork
            servers.watch()
            workers.watch()
            policy.look = coordinator.watch(policy.see)
            with _beside(run, workers, servers, begun_s):
                supervisor.run(workers, servers)
    return supervisor, name


def enter(
    spec: LaunchSpec,
    run_dir: RunDir,
    write: output.Write,
    session: Sequence[int] = (),
    hosts: Sequence[str] | None = None,
) -> str:
    """Make the run known to `shoal ps` and `shoal stop`; returns its name.

    `session`: the workers' processes, where they are forks. `hosts` of the workers: default this.
    """
    strategy = spec.config.strategy or "single"
    hosts = hosts or [socket.gethostname()] * spec.workers
    facts = RunFacts(
        strategy, spec.workers, spec.servers, tuple(spec.command), tuple(hosts), tuple(session)
    )
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


class LocalServers(Processes):
    """The servers of a run on this host."""

    def __init__(
        self, run: Run, pump: output.OutputPump, coordinator: RunCoordinator, policy: ServerPolicy
    ):
        template = run.spec.template
        loaded = template if template is not None and template.has_forked else None
        super().__init__(run.events.put, "server", loaded)
        self._run = run
        self._pump = pump
        self._coordinator = coordinator
        self._policy = policy
        self.stderr: list[output.LineForwarder] = []

    def start_all(self) -> None:
        self.stderr = [self._start_server(index) for index in range(self._run.spec.servers)]

    def start_again(self, rank: int) -> None:
        self._run.run_dir.remove_socket(rank)
        self.stderr[rank] = self._start_server(rank, again=True)

    def note_exit(self, rank: int) -> None:
        self._coordinator.server_exited(rank, self.pid_of(rank))

    def _start_server(self, index: int, again: bool = False) -> output.LineForwarder:
        """`again`: in the place of one that was lost."""
        spec = self._run.spec
        run_dir = self._run.run_dir
        environ = self._run.server_config(spec.config, index).to_environment()
        pipes = self.start(spec.server_command, environ, rank=index if again else None)
        run_dir.note(run_dir.server_pid(index), str(self.pid_of(index)))
        self._policy.started(index, self.pid_of(index))
        return self._pump.connect(pipes, self._run.streams(f"[server {index}] ", "server", index))


class LocalWorkers(Processes):
    """The workers of a run on this host: copies of its command, or forks of this process."""

    def __init__(self, run: Run, pump: output.OutputPump, on_progress: output.OnProgress | None):
        super().__init__(run.events.put, template=run.spec.template)
        self._run = run
        self._pump = pump
        self._on_progress = on_progress
        silent = output.LineForwarder(run.write, "", True)
        self.stderr = [silent] * run.spec.workers

    def start_all(self, policy: LossPolicy) -> None:
        spec = self._run.spec
        for rank in range(spec.started, spec.workers):
            policy.note_absent(rank)
        for rank in range(spec.started):
            self._start_worker(rank)
        if spec.template is not None:
            spec.template.have_started()

    def start_again(self, rank: int) -> None:
        self._start_worker(rank, self._run.run_dir.incarnation(rank))

    def _start_worker(self, rank: int, incarnation: int = 0) -> None:
        run = self._run
        spec = self._run.spec
        config = replace(
            spec.config,
            rank=rank,
            size=spec.workers,
            local_rank=rank,
            local_size=spec.workers,
            rendezvous=run.run_dir.rendezvous,
            run_dir=run.run_dir,
            servers=spec.servers or spec.config.servers,
        )
        if spec.body is not None:
            self.fork(_in_fork, spec.body, config, run.run_dir, os.getpid())
            return
        pipe = self._pump.progress_pipe(self._on_progress)
        config = replace(
            config, launcher_pid=os.getpid(), progress_fd=pipe, incarnation=incarnation
        )
        inherited = () if pipe is None else (pipe,)
        again = rank if incarnation else None
        pipes = self.start(spec.command, _of_worker(config), inherited, again)
        prefix = f"[{rank}] " if spec.workers > 1 else ""
        self.stderr[rank] = self._pump.connect(pipes, run.streams(prefix, "rank", rank))


def _of_worker(config: RunConfig) -> dict[str, str]:
    """Its environment: with the same order of a set of words on every worker."""
    hash_seed = config.environ.get("PYTHONHASHSEED", "0")
    return config.with_environ(PYTHONUNBUFFERED="1", PYTHONHASHSEED=hash_seed).to_environment()


def _in_fork(
    body: Callable[[RunConfig], object], config: RunConfig, run_dir: RunDir, session_pid: int
) -> None:
    die_with(session_pid)
    config.export()
    try:
        body(config)
    except Exception as error:
        report_failure(run_dir, config.rank or 0, error)
        sys.exit(1)


def _beside(run: Run, workers: LocalWorkers, servers: LocalServers, begun_s: float) -> ExitStack:
    """Threads that look at the run while it goes on."""
    spec = run.spec
    run_dir = run.run_dir

    def running() -> list[tuple[str, int]]:
        names = [(f"worker {rank}", pid) for rank, pid in workers.running()]
        return names + [(spec.replication.in_words(i), pid) for i, pid in servers.running()]

    if spec.started < spec.workers:
        now = f"started {spec.started} of {counted(spec.workers, 'worker')}"
        run.say(f"{now}; shoal join starts another one")
    stack = ExitStack()
    if spec.servers:  # workers wait for them, which load first
        counts = f"{counted(spec.servers, 'server')} and {counted(spec.started, 'worker')}"
        line = f"starting {counts}"
        left_s = max(0.0, begun_s + SILENT_S - time.monotonic())
        is_heard = run.sink.is_used
        has_started = run_dir.all_joined.exists
        stack.enter_context(start_notice(line, run.say, is_heard, has_started, left_s))
    takes_back = spec.config.takes_back
    stack.enter_context(join_requests(run_dir, run.events.put, takes_back and spec.body is None))
    stack.enter_context(kept_memory(run_dir, takes_back))
    stack.enter_context(noticing_stopped(spec.config.wait, running, run.say))
    return stack
