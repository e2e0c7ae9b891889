"""Run a command as many workers on hosts that an engine lends, and supervise them.

    run_remote ── RemoteServers ── an agent for each server                  (remote_servers.py)
               ── RemoteWorkers ── an agent on each host ── its workers      (launch/agent.py)
               ── Supervisor: the same decisions as on one host              (launch/supervisor.py)

Ranks are placed block by block: those of a host are neighbours. The agent of the first host finds
a free port for the rendezvous; then the others are started. What workers report about themselves
comes through their agents into the run directory of this launcher.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shoal.errors import BadInput
from shoal.launch.agent_messages import (
    AgentMessage,
    FoundPort,
    HostRefused,
    HostTask,
    StepsDone,
    WorkerExited,
    WorkerOutput,
    WorkerProgress,
    read_message,
)
from shoal.launch.agent_processes import AgentProcesses, OutputSink
from shoal.launch.failures import FailureReport, first_failure, launch_error, write_failure
from shoal.launch.local import LaunchSpec, RunResult, enter, say_lost_servers
from shoal.launch.log_files import LogFiles
from shoal.launch.machines import Machine, Machines, ServerHosts
from shoal.launch.output import LineForwarder, OnProgress, Write, print_lines
from shoal.launch.processes import ProcessExit, Role
from shoal.launch.remote_run import RemoteRun
from shoal.launch.remote_servers import RemoteServers
from shoal.launch.supervisor import Event, SignalEvents, Supervisor
from shoal.runtime.run_dir import new_run_dir, new_secret

AGENT_COMMAND = (sys.executable, "-m", "shoal.launch.agent")


@dataclass(frozen=True)
class PlacedRanks:
    """Neighbouring ranks on one host."""

    machine: Machine
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def place(machines: Sequence[Machine], workers: int) -> list[PlacedRanks]:
    """Fill the hosts one after the other; BadInput where there are more workers than slots."""
    placed: list[PlacedRanks] = []
    first = 0
    for machine in machines:
        count = min(machine.slots, workers - first)
        if count > 0:
            placed.append(PlacedRanks(machine, first, count))
            first += count
    if first < workers:
        hosts = "1 host" if len(machines) == 1 else f"{len(machines)} hosts"
        raise BadInput(f"there are slots for {first} workers on {hosts}, not for {workers}")
    return placed


def run_remote(
    machines: Machines,
    spec: LaunchSpec,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """As `launch`, on other hosts."""
    spec.check()
    _check_local_options(spec)
    placed = place(machines.hosts(spec.workers), spec.workers)
    server_hosts = _server_hosts(machines, spec)
    supervisor = Supervisor(spec.workers, grace_s=spec.config.grace_s)
    put = supervisor.events.put
    start_s = time.monotonic()
    with LogFiles(spec.logs, spec.appends_logs) as logs, new_run_dir() as run_dir:
        secret = spec.config.read_secret() or new_secret()
        run = RemoteRun(machines, spec, run_dir, secret, put, write, logs, OutputSink(put))
        servers = RemoteServers(run, server_hosts)
        workers = RemoteWorkers(run, placed, on_progress)
        enter(spec, run_dir, [workers.host_of(rank) for rank in range(spec.workers)], write)

        def put_signal(event: Event) -> None:
            put(event)
            servers.end_start()
            workers.end_start()

        with SignalEvents(put_signal) as signals, servers, workers:
            servers.supervise(supervisor)
            supervisor.workers = workers.start_all(servers) if servers.start_all() else 0
            supervisor.run(workers, servers, lambda exit: exit.returncode == 0, run_dir)
        stderr: dict[Role, list[LineForwarder]] = {
            "worker": workers.stderr,
            "server": servers.stderr,
        }
        failures = supervisor.failures(run_dir, stderr)
        finished = run_dir.finished_ranks()
        reports = tuple(run_dir.read_reports(spec.workers))
        result = RunResult(
            time.monotonic() - start_s,
            (),
            reports,
            bool(finished),
            lost_servers=tuple(servers.policy.lost),
            servers_removed=servers.policy.removed,
        )
    signals.raise_first()
    if supervisor.output_error is not None:
        raise supervisor.output_error
    if failures:
        failure = first_failure(failures)
        of_role = servers.host_of if failure.role == "server" else workers.host_of
        raise launch_error(replace(failure, host=of_role(failure.rank)), finished)
    say_lost_servers(result, write)
    return result


def _server_hosts(machines: Machines, spec: LaunchSpec) -> ServerHosts:
    if not spec.servers:
        return ServerHosts(())
    hosts = machines.server_hosts(spec.servers, spec.replication)
    is_named = spec.config.coordinator is not None  # by SHOAL_COORDINATOR
    return replace(hosts, coordinator=None) if is_named else hosts


def _check_local_options(spec: LaunchSpec) -> None:
    config = spec.config
    if config.start is not None:
        raise BadInput("--start works with workers of this host only: leave it out with --on")
    if any(text.startswith("server:") for text in config.kill):
        raise BadInput("--kill server:… works with servers of this host only: leave out --on")


class RemoteWorkers:
    """The agents of all hosts. Use as a block: at its end they, and their workers, are gone."""

    def __init__(
        self, run: RemoteRun, placed: Sequence[PlacedRanks], on_progress: OnProgress | None
    ):
        self._run = run
        self._placed = placed
        self._spec = run.spec
        self._run_dir = run.run_dir
        self._on_progress = on_progress
        self._agents = AgentProcesses(run.machines, run.spec.config.environ, run.sink)
        self._starting: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the port, or an end
        self._exited: set[int] = set()
        self._config = run.spec.config
        self.stdout, self.stderr = ([self._show(r, e) for r in self._ranks] for e in (False, True))

    @property
    def _ranks(self) -> range:
        return range(self._spec.workers)

    def _show(self, rank: int, is_stderr: bool) -> LineForwarder:
        prefix = f"[{rank} {self.host_of(rank)}] "
        log = self._run.logs.of("rank", rank)
        return self._agents.forward(LineForwarder(self._run.write, prefix, is_stderr, log))

    def host_of(self, rank: int) -> str:
        return next(on.machine.name for on in self._placed if rank in on.ranks)

    # ------------------------------------------------------------------ starting and ending

    def start_all(self, servers: RemoteServers) -> int:
        """Returns how many workers were started: less than all where something ended the start."""
        self._config = servers.for_workers(replace(self._spec.config, servers=None))
        self._start(self._placed[0], None)
        port = self._starting.get()
        if port is None:
            return self._placed[0].count
        for placed in self._placed[1:]:
            self._start(placed, port)
        return self._spec.workers

    def end_start(self) -> None:
        """A start that still waits for a port ends."""
        self._starting.put(None)

    def _start(self, placed: PlacedRanks, port: int | None) -> None:
        self._agents.start(
            placed.machine,
            AGENT_COMMAND,
            self._task(placed, port),
            lambda line: self._take(placed, line),
            lambda status: self._end_host(placed, status),
        )

    def _task(self, placed: PlacedRanks, port: int | None) -> HostTask:
        spec = self._spec
        return HostTask(
            command=list(spec.command),
            python=sys.executable,
            folder=str(Path.cwd()),
            variables=self._run.variables(placed.machine, self._config),
            secret=self._run.secret.hex(),
            address=placed.machine.address,
            first_rank=placed.first,
            workers=placed.count,
            size=spec.workers,
            threads=spec.threads or spec.config.num_threads,
            cores=placed.machine.cores,
            master=self._placed[0].machine.address,
            master_port=port,
            shows_progress=self._on_progress is not None,
        )

    def __enter__(self) -> RemoteWorkers:
        self._agents.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._agents.__exit__()

    def signal_alone(self, number: signal.Signals) -> None:
        """Only a preemption asks for it: workers agree on a step, save, and end by themselves."""
        self._agents.preempt()

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM reaches the workers through their agents."""
        self._agents.signal(number)

    # ------------------------------------------------------------------ what agents report

    def _end_host(self, placed: PlacedRanks, status: int) -> None:
        """An agent that was killed takes its workers with it."""
        for rank in placed.ranks:
            if rank not in self._exited:
                self._note_exit(rank, status or -signal.SIGKILL, time.monotonic_ns())

    def _take(self, placed: PlacedRanks, line: str) -> None:
        try:
            message = read_message(line)
        except msgspec.DecodeError:  # an error of the interpreter, or of the engine
            self._agents.feed(self.stderr[placed.first], f"{line}\n")
            return
        self._handle(placed, message)

    def _handle(self, placed: PlacedRanks, message: AgentMessage) -> None:
        if isinstance(message, FoundPort):
            self._starting.put(message.port)
        elif isinstance(message, HostRefused):
            self._refuse(placed, message.sentence)
        elif isinstance(message, WorkerProgress):
            show = self._on_progress
            if show is not None:
                self._run.sink.call(lambda: show(message.record))
        elif isinstance(message, StepsDone):
            for rank in placed.ranks:
                self._run_dir.write_steps(rank, message.steps.get(rank, 0))
        elif message.rank not in placed.ranks:
            return  # not a worker of this host
        elif isinstance(message, WorkerOutput):
            streams = self.stderr if message.is_stderr else self.stdout
            self._agents.feed(streams[message.rank], message.text)
        else:
            self._end(message)

    def _end(self, message: WorkerExited) -> None:
        now_ns = time.monotonic_ns()
        if message.failure is not None:
            time_ns = now_ns - message.failure_age_ns
            write_failure(self._run_dir, message.rank, replace(message.failure, time_ns=time_ns))
        if message.report is not None:
            self._run_dir.write_report(message.rank, message.report)
        if message.has_finished:
            self._run_dir.mark_finished(message.rank)
        self._note_exit(message.rank, message.returncode, now_ns - message.age_ns)

    def _refuse(self, placed: PlacedRanks, sentence: str) -> None:
        now_ns = time.monotonic_ns()
        for rank in placed.ranks:
            report = FailureReport(now_ns, 2, f"{placed.machine.name}: {sentence}", "")
            write_failure(self._run_dir, rank, report)
            self._note_exit(rank, 2, now_ns)

    def _note_exit(self, rank: int, returncode: int, time_ns: int) -> None:
        self._exited.add(rank)
        self._run_dir.note_exit(rank, returncode)
        self._run.put(ProcessExit(rank, returncode, time_ns))
        self.end_start()
