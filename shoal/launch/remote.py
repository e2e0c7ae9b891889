"""Run a command as many workers on hosts that an engine lends, and supervise them.

    run_remote ── RemoteWorkers ── an agent on each host ── its workers      (launch/agent.py)
               ── Supervisor: the same decisions as on one host              (launch/supervisor.py)

Ranks are placed block by block: those of a host are neighbours. The agent of the first host finds
a free port for the rendezvous; then the others are started. What workers report about themselves
comes through their agents into the run directory of this launcher.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
from shoal.launch.failures import FailureReport, first_failure, launch_error, write_failure
from shoal.launch.local import LaunchSpec, RunResult, enter
from shoal.launch.log_files import LogFiles
from shoal.launch.machines import Machine, MachineProcess, Machines
from shoal.launch.output import LineForwarder, OnProgress, Write, print_lines
from shoal.launch.processes import ProcessExit
from shoal.launch.supervisor import TERM_S, Event, SignalEvents, Supervisor
from shoal.runtime.run_dir import RunDir, new_run_dir, new_secret

AGENT_COMMAND = (sys.executable, "-m", "shoal.launch.agent")
_END_S = TERM_S + 3.0  # an agent gives its workers TERM_S, kills them and removes its files


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
    """As `launch`, on other hosts. Servers of a strategy are started by the workers themselves."""
    spec.check()
    _check_local_options(spec)
    placed = place(machines.hosts(spec.workers), spec.workers)
    supervisor = Supervisor(spec.workers, grace_s=spec.config.grace_s)
    start_s = time.monotonic()
    with LogFiles(spec.logs, spec.appends_logs) as logs, new_run_dir() as run_dir:
        workers = RemoteWorkers(machines, placed, spec, run_dir, supervisor.events.put)
        workers.show(write, on_progress, logs)
        enter(spec, run_dir, [workers.host_of(rank) for rank in range(spec.workers)], write)
        with SignalEvents(workers.put) as signals, workers:
            supervisor.workers = workers.start_all()
            supervisor.run(workers, workers, lambda exit: exit.returncode == 0, run_dir)
        failures = supervisor.failures(run_dir, {"worker": workers.stderr, "server": []})
        finished = run_dir.finished_ranks()
        reports = tuple(run_dir.read_reports(spec.workers))
        result = RunResult(time.monotonic() - start_s, (), reports, bool(finished))
    signals.raise_first()
    if supervisor.output_error is not None:
        raise supervisor.output_error
    if failures:
        failure = first_failure(failures)
        raise launch_error(replace(failure, host=workers.host_of(failure.rank)), finished)
    return result


def _check_local_options(spec: LaunchSpec) -> None:
    config = spec.config
    if config.start is not None:
        raise BadInput("--start works with workers of this host only: leave it out with --on")
    if any(text.startswith("server:") for text in config.kill):
        raise BadInput("--kill server:… works with servers of this host only: leave out --on")


class RemoteWorkers:
    """The agents of all hosts. Use as a block: at its end they, and their workers, are gone."""

    def __init__(
        self,
        machines: Machines,
        placed: Sequence[PlacedRanks],
        spec: LaunchSpec,
        run_dir: RunDir,
        on_event: Callable[[Event], None],
    ):
        self._machines = machines
        self._placed = placed
        self._spec = spec
        self._run_dir = run_dir
        self._on_event = on_event
        self._on_progress: OnProgress | None = None
        self._starting: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the port, or an end
        self._agents: list[MachineProcess] = []
        self._waiters: list[threading.Thread] = []
        self._exited: set[int] = set()
        self._handling = threading.Lock()  # one line at a time, and in order for each host
        self._output_failed = False
        self._secret = spec.config.read_secret() or new_secret()

    def show(self, write: Write, on_progress: OnProgress | None, logs: LogFiles) -> None:
        """Where output and progress go; before the start."""
        self._on_progress = on_progress
        names = [self.host_of(rank) for rank in range(self._spec.workers)]
        shown = [(f"[{rank} {name}] ", logs.of("rank", rank)) for rank, name in enumerate(names)]
        self.stdout = [LineForwarder(write, prefix, False, log) for prefix, log in shown]
        self.stderr = [LineForwarder(write, prefix, True, log) for prefix, log in shown]

    def host_of(self, rank: int) -> str:
        return next(on.machine.name for on in self._placed if rank in on.ranks)

    def put(self, event: Event) -> None:
        """An event of the run; a start that still waits for a port ends."""
        self._on_event(event)
        self._starting.put(None)

    # ------------------------------------------------------------------ starting and ending

    def start_all(self) -> int:
        """Returns how many workers were started: less than all where something ended the start."""
        self._start(self._placed[0], None)
        port = self._starting.get()
        if port is None:
            return self._placed[0].count
        for placed in self._placed[1:]:
            self._start(placed, port)
        return self._spec.workers

    def _start(self, placed: PlacedRanks, port: int | None) -> None:
        def on_line(line: str) -> None:
            self._take(placed, line)

        given = msgspec.json.encode(self._task(placed, port))
        environ = self._spec.config.environ
        agent = self._machines.start(placed.machine, AGENT_COMMAND, environ, given, on_line)
        self._agents.append(agent)
        waiter = threading.Thread(
            target=self._wait,
            args=(placed, agent),
            name=f"shoal-wait-{placed.machine.name}",
            daemon=True,
        )
        waiter.start()
        self._waiters.append(waiter)

    def _task(self, placed: PlacedRanks, port: int | None) -> HostTask:
        spec = self._spec
        return HostTask(
            command=list(spec.command),
            python=sys.executable,
            folder=str(Path.cwd()),
            variables=self._variables(placed.machine),
            secret=self._secret.hex(),
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

    def _variables(self, machine: Machine) -> dict[str, str]:
        """Those of Shoal; what only this host has is left out."""
        config = self._spec.config
        trusted = config.tls.trusted_network or self._machines.is_private
        return replace(
            config,
            secret=None,
            secret_file=None,
            servers=None,
            run_dir=None,
            host_id=f"{self._run_dir.path.name}-{machine.name}",
            tls=replace(config.tls, trusted_network=trusted),
            environ={},
        ).to_environment()

    def __enter__(self) -> RemoteWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGTERM)
        self._join()
        for agent, waiter in zip(self._agents, self._waiters, strict=True):
            if waiter.is_alive():
                agent.kill()
        self._join()
        if not any(waiter.is_alive() for waiter in self._waiters):  # or one blocks in `write`
            for forwarder in (*self.stdout, *self.stderr):
                self._call_sink(forwarder.close)

    def _join(self) -> None:
        deadline_s = time.monotonic() + _END_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline_s - time.monotonic()))

    def signal_alone(self, number: signal.Signals) -> None:
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM reaches the workers through their agents."""
        for agent in self._agents:
            agent.kill() if number == signal.SIGKILL else agent.terminate()

    # ------------------------------------------------------------------ what agents report

    def _wait(self, placed: PlacedRanks, agent: MachineProcess) -> None:
        """An agent that was killed takes its workers with it."""
        status = agent.wait() or -signal.SIGKILL
        for rank in placed.ranks:
            if rank not in self._exited:
                self._note_exit(rank, status, time.monotonic_ns())

    def _take(self, placed: PlacedRanks, line: str) -> None:
        try:
            message = read_message(line)
        except msgspec.DecodeError:  # an error of the interpreter, or of the engine
            text = f"{line}\n".encode()
            self._call_sink(lambda: self.stderr[placed.first].feed(text))
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
                self._call_sink(lambda: show(message.record))
        elif isinstance(message, StepsDone):
            for rank in placed.ranks:
                self._run_dir.write_steps(rank, message.steps.get(rank, 0))
        elif message.rank not in placed.ranks:
            return  # not a worker of this host
        elif isinstance(message, WorkerOutput):
            streams = self.stderr if message.is_stderr else self.stdout
            self._call_sink(lambda: streams[message.rank].feed(message.text.encode()))
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
        self.put(ProcessExit(rank, returncode, time_ns))

    def _call_sink(self, act: Callable[[], None]) -> None:
        """As OutputPump does: an error of `write` ends the run, and the rest is discarded."""
        with self._handling:
            if self._output_failed:
                return
            try:
                act()
            except Exception as error:
                self._output_failed = True
                self.put(error)
