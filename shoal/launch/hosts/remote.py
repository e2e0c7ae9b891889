"""Run a command as many workers on hosts that an engine lends, and supervise them.

run_remote ── RemoteServers ── an agent for each server                  (remote_servers.py)
           ── RemoteWorkers ── an agent on each host ── its workers      (launch/hosts/agent.py)
           ── Supervisor: the same decisions as on one host              (launch/here/supervisor.py)
           ── a board, where the strategy is elastic: workers leave and come back

run_attempts starts all workers again after a loss (`shoal run --on ENGINE --restart N`), on hosts
that the engine is asked for again. The script runs from its start, and goes on from what it loads.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shoal.comm.members.board import GroupMember
from shoal.comm.members.network_board import ServedBoard
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import SILENT_HOST_S
from shoal.errors import BadInput, ServerFailed, WorkersFailed
from shoal.launch.here.local import LaunchSpec, enter
from shoal.launch.here.output import LogFiles, OnProgress, OutputSink, Streams, Write
from shoal.launch.here.processes import ProcessExit
from shoal.launch.here.running import join_requests
from shoal.launch.here.supervisor import Event, SignalEvents
from shoal.launch.hosts import agent_messages as messages
from shoal.launch.hosts.machines import (
    Machine,
    MachineProcess,
    Machines,
    PlacedRanks,
    ServerHosts,
    place_evenly,
)
from shoal.launch.hosts.remote_servers import RemoteProcesses, RemoteRun, RemoteServers
from shoal.launch.losses.failures import FailureReport, write_failure
from shoal.launch.losses.lost_workers import LossPolicy, RunResult
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import read_kills
from shoal.runtime.files import document_of
from shoal.runtime.run_dir import new_run_dir, written_by
from shoal.runtime.secret import new_secret

_NOTICED_S = SILENT_HOST_S + 3.0


class LostHosts:
    """Used by several threads."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._changed = threading.Condition()
        self._gave_up: set[int] = set()
        self._is_over = False

    def add(self, name: str) -> None:
        with self._changed:
            self.names.add(name)
            self._changed.notify_all()

    def note_exit(self, rank: int, returncode: int) -> None:
        """A worker that raises has lost its peers: an error of its own would end the run."""
        (self._gave_up.add if returncode > 0 else self._gave_up.discard)(rank)

    def has_host_of(self, rank: int, name: str) -> bool:
        """Whether the host `name`, on which this worker was, is lost."""
        patience_s = _NOTICED_S if rank in self._gave_up else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or name in self.names, patience_s)
            return name in self.names

    def end(self) -> None:
        """The run is over: what waits for a host waits no longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class HostAgent:
    """One agent, and those of its workers that have not exited."""

    def __init__(self, placed: PlacedRanks, incarnation: int = 0):
        self.placed = placed
        self.incarnation = incarnation  # of its workers
        self.name = f"{placed.first}.{incarnation}"
        self.process: MachineProcess | None = None
        self.left = set(placed.ranks)


class RemoteWorkers(RemoteProcesses):
    """The agents of all hosts, and their workers."""

    def __init__(
        self, run: RemoteRun, placed: Sequence[PlacedRanks], on_progress: OnProgress | None
    ):
        """`placed` has all workers that there may be, also those that come later."""
        super().__init__(run)
        self._placed = placed
        self._at: dict[int, tuple[Machine, int]] = {}  # by rank its host, and its number there
        here: Counter[str] = Counter()  # a host may have several blocks of ranks
        for on in placed:
            for rank in on.ranks:
                self._at[rank] = (on.machine, here[on.machine.name])
                here[on.machine.name] += 1
        self._spec = run.spec
        self._run_dir = run.run_dir
        self._on_progress = on_progress
        self._port = 0
        self._hosts: dict[str, HostAgent] = {}  # by the name of the agent
        self._lost_hosts = LostHosts()
        self._noting = threading.Lock()
        self._config = run.spec.config
        self._server_kills = read_kills(self._config.kill, None, "server")
        self._kill_server: Callable[[int], None] = lambda server: None
        self.board: ServedBoard | None = None  # of an elastic run
        self.board_address: str | None = None  # where workers find it
        self._output = {rank: self._show(rank) for rank in range(run.spec.workers)}

    def _show(self, rank: int) -> Streams:
        return self._streams(str(rank), self._at[rank][0], "rank", rank)

    def host_of(self, rank: int) -> str:
        """Where its latest process is."""
        return self._at[rank][0].name

    # ------------------------------------------------------------------ starting and ending

    def start_all(self, servers: RemoteServers) -> int:
        """Returns how many workers were started: less than all where something ended the start."""
        self._config = servers.for_workers(replace(self._spec.config, servers=None))
        self._kill_server = servers.kill
        started = self._spec.started
        placed = [replace(on, count=min(on.count, started - on.first)) for on in self._placed]
        first, *others = [HostAgent(on) for on in placed if on.count > 0]
        self._start(first, None)
        port = self._awaited.get()
        if port is None:
            return first.placed.count
        self._port = port
        for agent in others:
            self._start(agent, port)
        return started

    def note_exit(self, rank: int) -> None:
        if self.board is not None:
            self.board.note_exit(GroupMember(rank, self._run_dir.incarnation(rank)))

    def start_again(self, rank: int) -> None:
        """Start a worker that was lost, or is asked for, on its host or on another one."""
        incarnation = self._run_dir.incarnation(rank)
        if self.board is not None:
            self.board.note_start(GroupMember(rank, incarnation))
        self._in_background(f"shoal-worker-{rank}", lambda: self._find_and_start(rank, incarnation))

    def _find_and_start(self, rank: int, incarnation: int) -> None:
        agent = HostAgent(PlacedRanks(self._at[rank][0], rank, 1), incarnation)
        try:
            agent = HostAgent(PlacedRanks(self._machine_for(rank), rank, 1), incarnation)
            if not self._over.is_set():
                self._start(agent, self._port)
        except BadInput as error:
            self._run.say(f"worker {rank} cannot be started again: {error}")
            self._note_exit(agent, rank, -signal.SIGKILL, time.monotonic_ns())

    def _machine_for(self, rank: int) -> Machine:
        """Its own, unless that is lost."""
        machine, local_rank = self._at[rank]
        if self._lost_hosts.has_host_of(rank, machine.name):
            lost = frozenset(self._lost_hosts.names)
            machine = self._run.machines.replacement(machine, lost, self._over)
            taken = {local for other, local in self._at.values() if other.name == machine.name}
            local_rank = next(number for number in range(len(taken) + 1) if number not in taken)
            self._at[rank] = (machine, local_rank)
            self._output[rank] = self._show(rank)
        return machine

    def _start(self, agent: HostAgent, port: int | None) -> None:
        self._hosts[agent.name] = agent
        agent.process = self._start_agent(
            agent.placed.machine,
            self._task(agent, port),
            lambda line: self._take(agent, line),
            lambda status: self._end_host(agent, status),
        )

    def _task(self, agent: HostAgent, port: int | None) -> messages.HostTask:
        spec = self._spec
        placed = agent.placed
        name = placed.machine.name
        here = [local for machine, local in self._at.values() if machine.name == name]
        config = replace(self._config, incarnation=agent.incarnation, board=self.board_address)
        return messages.HostTask(
            command=list(spec.command),
            python=sys.executable,
            folder=str(Path.cwd()),
            variables=self._run.variables(placed.machine, config),
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
            local_rank=self._at[placed.first][1],
            local_size=max(here) + 1,
            name=agent.name,
        )

    def __exit__(self, *error: object) -> None:
        self._lost_hosts.end()
        super().__exit__(*error)

    # ------------------------------------------------------------------ what agents report

    def lose_agent(self, name: str) -> None:
        """Its connection has broken: the host is lost, unless all of its workers have exited."""
        agent = self._hosts[name]
        if agent.process is None or self._over.is_set():
            return
        host = agent.placed.machine.name
        self._lost_hosts.add(host)
        if not agent.left:  # they had given up before
            return
        self._run.say(f"{host} is lost: the connection to its agent broke, or was silent")
        agent.process.send_signal(signal.SIGKILL)
        self._end_host(agent, -signal.SIGKILL)

    def _end_host(self, agent: HostAgent, status: int) -> None:
        """An agent that was killed takes its workers with it."""
        if agent.left:
            self._lost_hosts.add(agent.placed.machine.name)
        for rank in sorted(agent.left):
            self._note_exit(agent, rank, status or -signal.SIGKILL, time.monotonic_ns())

    def _take(self, agent: HostAgent, line: str) -> None:
        message = messages.read_message(line, agent.placed.first)
        if isinstance(message, messages.FoundPort):
            self._awaited.put(message.port)
        elif isinstance(message, messages.HostRefused):
            self._refuse(agent, message.sentence)
        elif isinstance(message, messages.WorkerProgress):
            show = self._on_progress
            if show is not None:
                self._run.sink.call(lambda: show(message.record))
        elif isinstance(message, messages.FileWritten):
            self._write(agent, message)
        elif isinstance(message, messages.ServerMessage) or message.rank not in agent.placed.ranks:
            return  # not of a worker of this host
        elif isinstance(message, messages.ProcessOutput):
            self._feed(self._output[message.rank][message.is_stderr], message.text)
        elif message.rank in agent.left:
            self._lost_hosts.note_exit(message.rank, message.returncode)
            time_ns = time.monotonic_ns() - message.age_ns
            self._note_exit(agent, message.rank, message.returncode, time_ns)

    def _write(self, agent: HostAgent, message: messages.FileWritten) -> None:
        """A file of a worker of this host, with times of the launcher's clock."""
        rank = written_by(message.name)
        text = message.text
        if rank is None or rank not in agent.placed.ranks:
            return
        if message.name.endswith(".json"):
            if (document := document_of(text)) is None:  # nothing that a worker writes
                return
            if isinstance(document.get("time_ns"), int):
                document["time_ns"] += time.monotonic_ns() - message.clock_ns
            if "lost_at" in document:  # the steps that are known are those of its earlier process
                document["lost_at"] = self._run_dir.steps_done(rank) or 0
            text = json.dumps(document)
        self._run_dir.note(self._run_dir.path / message.name, text)
        begun = (self._run_dir.steps_done(rank) or 0) + 1
        for server, at in self._server_kills:
            if begun >= at and self._run_dir.claim_kill(server, at):
                self._kill_server(server)

    def _refuse(self, agent: HostAgent, sentence: str) -> None:
        now_ns = time.monotonic_ns()
        for rank in sorted(agent.left):
            report = FailureReport(now_ns, 2, f"{agent.placed.machine.name}: {sentence}", "")
            write_failure(self._run_dir, rank, report)
            self._note_exit(agent, rank, 2, now_ns)

    def _note_exit(self, agent: HostAgent, rank: int, returncode: int, time_ns: int) -> None:
        with self._noting:
            if rank not in agent.left:
                return
            agent.left.discard(rank)
        self._run_dir.note_exit(rank, returncode)
        self._run.events.put(ProcessExit(rank, returncode, time_ns))
        self.end_start()


def run_remote(
    machines: Machines, spec: LaunchSpec, write: Write, on_progress: OnProgress | None = None
) -> RunResult:
    """As `launch`, on other hosts. A tolerance is that of an elastic strategy."""
    spec.check()
    if spec.config.start is not None and spec.tolerance is None:
        raise BadInput("--start works with workers of this host only: leave it out with --on")
    placed = place_evenly(machines.hosts(spec.workers), spec.started, spec.workers)
    server_hosts = ServerHosts(())
    if spec.servers:
        server_hosts = machines.server_hosts(spec.servers, spec.replication)
    if spec.config.coordinator is not None:  # named by SHOAL_COORDINATOR
        server_hosts = replace(server_hosts, coordinator=None)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with LogFiles(spec.logs, spec.appends_logs) as logs, new_run_dir() as run_dir:
        secret = spec.config.read_secret() or new_secret()
        sink = OutputSink(events.put)
        run = RemoteRun(spec, run_dir, events, write, logs, sink, machines, secret)
        servers = RemoteServers(run, server_hosts)
        workers = RemoteWorkers(run, placed, on_progress)
        supervisor = run.supervisor(servers.policy, on_progress)
        enter(spec, run_dir, write, hosts=[workers.host_of(rank) for rank in range(spec.workers)])

        def put_signal(event: Event) -> None:
            events.put(event)
            servers.end_start()
            workers.end_start()

        with (
            SignalEvents(put_signal) as signals,
            _serving_board(run, workers, supervisor.policy),
            servers,
            workers,
        ):
            supervisor.workers = workers.start_all(servers) if servers.start_all() else 0
            supervisor.run(workers, servers)
        return supervisor.result(spec.workers, signals, write)


@contextmanager
def _serving_board(run: RemoteRun, workers: RemoteWorkers, policy: LossPolicy) -> Iterator[None]:
    """While the block runs, workers of an elastic run find its board, which this process serves."""
    if run.spec.tolerance is None:
        yield
        return
    listener = run.machines.listen()
    host, port = listener.getsockname()[:2]
    service = StoreService(host, port, run.secret, listener, workers.lose_agent)
    try:
        workers.board = ServedBoard(service)
        workers.board_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for rank in range(run.spec.started, run.spec.workers):  # the others do not wait for them
            policy.note_absent(rank)
            workers.note_exit(rank)
        with join_requests(run.run_dir, run.events.put):
            yield
    finally:
        service.close()


def run_attempts(
    machines: Machines, spec: LaunchSpec, write: Write, on_progress: OnProgress | None = None
) -> RunResult:
    """As `run_remote`. An error of the script is no loss, and would come again."""
    if spec.tolerance is not None:  # only lost workers are started again
        return run_remote(machines, spec, write, on_progress)
    restarts = spec.config.restarts or 0
    spec = replace(spec, config=replace(spec.config, restarts=None))
    for count in range(1, restarts + 1):
        try:
            return run_remote(machines, spec, write, on_progress)
        except (WorkersFailed, ServerFailed) as error:
            if not error.is_loss:
                raise
            write(
                f"shoal: {_loss(error)}; all workers are started again ({count} of {restarts})\n",
                True,
            )
        spec = replace(spec, config=_after_loss(spec.config), appends_logs=True)
    return run_remote(machines, spec, write, on_progress)


def _loss(error: WorkersFailed | ServerFailed) -> str:
    """Its last line, where a worker has reported the loss of a peer with a traceback."""
    lines = str(error).strip().splitlines()
    if len(lines) == 1 or isinstance(error, ServerFailed):
        return lines[0].rstrip(":")  # what a lost server has printed last was shown
    return f"worker {error.rank} failed: {lines[-1]}"


def _after_loss(config: RunConfig) -> RunConfig:
    """--kill has killed; servers go on from their latest checkpoint."""
    saved = config.server_checkpoint
    has_saved = saved.folder is not None and bool(complete_versions(saved.folder))
    resume = saved.resume or has_saved
    return replace(config, kill=(), server_checkpoint=replace(saved, resume=resume))
