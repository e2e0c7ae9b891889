"""The workers of a run on lent hosts: an agent on each host starts them and reports on them.

Ranks are placed block by block: those of a host are neighbours; workers of an elastic run that may
come later have the ranks after all of these. The agent of the first host finds a free port for the
rendezvous; then the others are started. What workers report about themselves comes through their
agents into the run directory of this launcher. A worker of an elastic run that is started later has
an agent of its own.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.comm.members.board import GroupMember
from shoal.comm.members.network_board import ServedBoard
from shoal.comm.store.session import SILENT_HOST_S
from shoal.errors import BadInput
from shoal.launch.here.output import LineForwarder, OnProgress
from shoal.launch.here.processes import ProcessExit
from shoal.launch.hosts.agent_messages import (
    AgentMessage,
    FileWritten,
    FoundPort,
    HostRefused,
    HostTask,
    ProcessOutput,
    ServerMessage,
    WorkerProgress,
    read_message,
)
from shoal.launch.hosts.machines import Machine, MachineProcess, PlacedRanks
from shoal.launch.hosts.remote_servers import RemoteProcesses, RemoteRun, RemoteServers, Streams
from shoal.launch.losses.failures import FailureReport, write_failure
from shoal.runtime.files import write_atomically
from shoal.runtime.run_dir import written_by

_NOTICED_S = SILENT_HOST_S + 3.0


class LostHosts:
    """Used by several threads."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._changed = threading.Condition()
        self._gave_up: set[int] = set()
        self._is_over = False

    @property
    def names(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._names)

    def add(self, name: str) -> None:
        with self._changed:
            self._names.add(name)
            self._changed.notify_all()

    def note_exit(self, rank: int, returncode: int) -> None:
        """A worker that raises has lost its peers: an error of its own would end the run."""
        (self._gave_up.add if returncode > 0 else self._gave_up.discard)(rank)

    def has_host_of(self, rank: int, name: str) -> bool:
        """Whether the host `name`, on which this worker was, is lost."""
        patience_s = _NOTICED_S if rank in self._gave_up else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or name in self._names, patience_s)
            return name in self._names

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
        self._at = _with_local_ranks(placed)
        self._spec = run.spec
        self._run_dir = run.run_dir
        self._on_progress = on_progress
        self._starting: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the port, or an end
        self._port = 0
        self._hosts: dict[str, HostAgent] = {}  # by the name of the agent
        self._lost_hosts = LostHosts()
        self._noting = threading.Lock()
        self._config = run.spec.config
        self._board: ServedBoard | None = None  # of an elastic run
        self._board_address: str | None = None
        self._output = {rank: self._show(rank) for rank in range(run.spec.workers)}

    @property
    def stderr(self) -> list[LineForwarder]:
        return [err for _, err in self._output.values()]

    def _show(self, rank: int) -> Streams:
        return self._streams(str(rank), self._at[rank][0], "rank", rank)

    def host_of(self, rank: int) -> str:
        """Where its latest process is."""
        return self._at[rank][0].name

    # ------------------------------------------------------------------ starting and ending

    def start_all(self, servers: RemoteServers) -> int:
        """Returns how many workers were started: less than all where something ended the start."""
        self._config = servers.for_workers(replace(self._spec.config, servers=None))
        started = range(self._spec.started)
        placed = [replace(on, count=len(_common(on.ranks, started))) for on in self._placed]
        first, *others = [HostAgent(on) for on in placed if on.count]
        self._start(first, None)
        port = self._starting.get()
        if port is None:
            return first.placed.count
        self._port = port
        for agent in others:
            self._start(agent, port)
        return len(started)

    def serve(self, board: ServedBoard, address: str) -> None:
        """In an elastic run workers find it at this address."""
        self._board, self._board_address = board, address

    def note_exit(self, rank: int) -> None:
        if self._board is not None:
            self._board.note_exit(GroupMember(rank, self._run_dir.incarnation(rank)))

    def end_start(self) -> None:
        """A start that still waits for a port ends."""
        self._starting.put(None)

    def start_again(self, rank: int) -> None:
        """Start a worker that was lost, or is asked for, on its host or on another one."""
        incarnation = self._run_dir.incarnation(rank)
        if self._board is not None:
            self._board.note_start(GroupMember(rank, incarnation))
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
            lost = self._lost_hosts.names
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

    def _task(self, agent: HostAgent, port: int | None) -> HostTask:
        spec, placed = self._spec, agent.placed
        name = placed.machine.name
        here = [local for machine, local in self._at.values() if machine.name == name]
        config = replace(self._config, incarnation=agent.incarnation, board=self._board_address)
        return HostTask(
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
        self._lost_hosts.add(agent.placed.machine.name)
        if not agent.left:  # they had given up before
            return
        name = agent.placed.machine.name
        self._run.say(f"{name} is lost: the connection to its agent broke, or was silent")
        agent.process.kill()
        self._end_host(agent, -signal.SIGKILL)

    def _end_host(self, agent: HostAgent, status: int) -> None:
        """An agent that was killed takes its workers with it."""
        if agent.left:
            self._lost_hosts.add(agent.placed.machine.name)
        for rank in sorted(agent.left):
            self._note_exit(agent, rank, status or -signal.SIGKILL, time.monotonic_ns())

    def _take(self, agent: HostAgent, line: str) -> None:
        try:
            message = read_message(line)
        except msgspec.DecodeError:  # an error of the interpreter, or of the engine
            self._feed(self._output[agent.placed.first][1], f"{line}\n")
            return
        self._handle(agent, message)

    def _handle(self, agent: HostAgent, message: AgentMessage) -> None:
        if isinstance(message, FoundPort):
            self._starting.put(message.port)
        elif isinstance(message, HostRefused):
            self._refuse(agent, message.sentence)
        elif isinstance(message, WorkerProgress):
            show = self._on_progress
            if show is not None:
                self._run.sink.call(lambda: show(message.record))
        elif isinstance(message, FileWritten):
            self._write(agent, message)
        elif isinstance(message, ServerMessage) or message.rank not in agent.placed.ranks:
            return  # not of a worker of this host
        elif isinstance(message, ProcessOutput):
            self._feed(self._output[message.rank][message.is_stderr], message.text)
        elif message.rank in agent.left:
            self._lost_hosts.note_exit(message.rank, message.returncode)
            time_ns = time.monotonic_ns() - message.age_ns
            self._note_exit(agent, message.rank, message.returncode, time_ns)

    def _write(self, agent: HostAgent, message: FileWritten) -> None:
        """A file of a worker of this host, with times of the launcher's clock."""
        rank, text = written_by(message.name), message.text
        if rank is None or rank not in agent.placed.ranks:
            return
        if message.name.endswith(".json"):
            document = json.loads(text)
            if "time_ns" in document:
                document["time_ns"] += time.monotonic_ns() - message.clock_ns
            if "lost_at" in document:  # the steps that are known are those of its earlier process
                document["lost_at"] = self._run_dir.steps_done(rank) or 0
            text = json.dumps(document)
        write_atomically(self._run_dir.path / message.name, text)

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


def _with_local_ranks(placed: Sequence[PlacedRanks]) -> dict[int, tuple[Machine, int]]:
    """By rank its host, which may have several blocks of ranks, and its number there."""
    here: Counter[str] = Counter()
    found: dict[int, tuple[Machine, int]] = {}
    for on in placed:
        for rank in on.ranks:
            found[rank] = (on.machine, here[on.machine.name])
            here[on.machine.name] += 1
    return found


def _common(ranks: range, others: range) -> range:
    return range(max(ranks.start, others.start), min(ranks.stop, others.stop))
