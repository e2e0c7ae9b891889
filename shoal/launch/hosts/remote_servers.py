"""Servers of a run on hosts that an engine lends, and their coordinator: started, replaced, ended.

    RemoteServers ── an agent for each server ──────── python -m shoal.server.main
                  ── an agent for the coordinator ──── python -m shoal.server.coordinator.main

Workers start while servers load: an agent says at once where its server is going to listen. A
server that is lost is started again where the engine says, in the background; the others, and
workers, find it through the coordinator.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec

from shoal.errors import BadInput
from shoal.launch.here.local import Run
from shoal.launch.here.output import LineForwarder, Streams
from shoal.launch.here.processes import ProcessExit
from shoal.launch.here.supervisor import TERM_S
from shoal.launch.hosts import agent_messages as messages
from shoal.launch.hosts.machines import HostProgram, Machine, MachineProcess, Machines, ServerHosts
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.runtime.config import RunConfig
from shoal.runtime.variable_text import LaunchedServer
from shoal.server.protocol.endpoint import require_encrypted

AGENT_COMMAND = (sys.executable, "-m", "shoal.launch.hosts.agent")
_END_S = TERM_S + 3.0  # an agent gives its processes TERM_S, kills them and removes its files


@dataclass(frozen=True)
class RemoteRun(Run):
    """One attempt of a run on hosts of an engine."""

    machines: Machines
    secret: bytes = field(repr=False)

    def host_id(self, machine: Machine) -> str:
        """What tells it from other hosts, on which processes share no memory with it."""
        return f"{self.run_dir.path.name}-{machine.name}"

    def variables(self, machine: Machine, config: RunConfig) -> dict[str, str]:
        """Those of Shoal for processes of this host; what only the launcher has is left out."""
        trusted = config.tls.trusted_network or self.machines.is_private
        return replace(
            config,
            secret=None,
            secret_file=None,
            run_dir=None,
            host_id=self.host_id(machine),
            rack=machine.rack or config.rack,
            tls=replace(config.tls, trusted_network=trusted),
            environ={},
        ).to_environment()


COORDINATOR = -1  # its number among the servers


class RemoteProcesses:
    """Agents, and the processes of one role that they have started.

    Use as a block: at its end all of them are gone.
    """

    def __init__(self, run: RemoteRun):
        self._run = run
        self._over = threading.Event()
        self._agents: list[MachineProcess] = []
        self._waiters: list[threading.Thread] = []
        self._restarting: list[threading.Thread] = []
        self._forwarders: list[LineForwarder] = []
        self._output: dict[int, Streams] = {}  # by rank, or number of a server
        self._starting_agent = threading.Lock()
        # what an agent says that another one waits for; None: the start ends
        self._awaited: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    @property
    def stderr(self) -> list[LineForwarder]:
        return [err for rank, (_, err) in sorted(self._output.items()) if rank != COORDINATOR]

    def end_start(self) -> None:
        """A start that still waits ends; from another thread, or a signal handler."""
        self._awaited.put(None)

    def note_exit(self, rank: int) -> None:
        """A rank has exited. Workers publish it on the board; for servers nothing is published."""

    def _start_agent(
        self,
        machine: Machine,
        task: messages.Task,
        on_line: Callable[[str], None],
        on_end: Callable[[int], None],
    ) -> MachineProcess | None:
        """It reads `task` at its stdin; `on_end` is called with its exit status, from a thread.

        At the end of the block nothing is started any more: None.
        """
        environ = self._run.spec.config.environ
        program = HostProgram(AGENT_COMMAND, environ, msgspec.json.encode(task), on_line)
        with self._starting_agent:
            if self._over.is_set():
                return None
            agent = self._run.machines.start(machine, program)
            self._agents.append(agent)
            name = f"shoal-wait-{machine.name}"
            waiter = threading.Thread(target=lambda: on_end(agent.wait()), name=name, daemon=True)
            self._waiters.append(waiter)
            waiter.start()
        return agent

    def _in_background(self, name: str, start: Callable[[], None]) -> None:
        """An engine may need time for a host in place of one that is lost."""
        thread = threading.Thread(target=start, name=name, daemon=True)
        self._restarting.append(thread)
        thread.start()

    def _streams(self, name: str, machine: Machine, role: str, rank: int | None = None) -> Streams:
        """Stdout and stderr of a process; they are closed at the end of the block."""
        streams = self._run.streams(f"[{name} {machine.name}] ", role, rank)
        self._forwarders += streams
        return streams

    def _feed(self, forwarder: LineForwarder, text: str) -> None:
        self._run.sink.call(lambda: forwarder.feed(text.encode()))

    def signal_alone(self, number: signal.Signals) -> None:
        """Only a preemption asks for it: workers agree on a step, save, and end by themselves."""
        self.signal(signal.SIGUSR1)

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM reaches the processes of agents through them."""
        for agent in list(self._agents):
            agent.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting_agent:
            self._over.set()
        self.signal(signal.SIGTERM)
        if self._join():
            self.signal(signal.SIGKILL)
        if not self._join():  # or one blocks in `write`
            for forwarder in self._forwarders:
                self._run.sink.call(forwarder.close)
        for thread in self._restarting:
            thread.join()

    def _join(self) -> bool:
        """Whether an agent is left."""
        deadline_s = time.monotonic() + _END_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline_s - time.monotonic()))
        return any(waiter.is_alive() for waiter in self._waiters)


class RemoteServers(RemoteProcesses):
    """All servers, and their coordinator as number -1."""

    def __init__(self, run: RemoteRun, hosts: ServerHosts):
        super().__init__(run)
        self._hosts = dict(enumerate(hosts.servers))
        if hosts.coordinator is not None:
            self._hosts[COORDINATOR] = hosts.coordinator
        self._addresses: dict[int, LaunchedServer] = {}
        self._exited: dict[int, int] = {}
        self._agent_of: dict[int, MachineProcess | None] = {}
        spec = run.spec
        saved = spec.config.server_checkpoint
        self.policy = ServerPolicy(spec.servers, spec.replication, run.say, saved, are_here=False)
        for index in self._hosts:
            self._show(index)

    def host_of(self, index: int) -> str:
        return self._hosts[index].name

    # ------------------------------------------------------------------ starting

    def start_all(self) -> bool:
        """False where something has ended the start."""
        tls = self._run.spec.config.tls
        for machine in self._hosts.values():  # BadInput before any of them would refuse to listen
            if not tls.certificate and not self._run.machines.is_private:
                require_encrypted(machine.address, tls)
        if COORDINATOR in self._hosts:
            self._start(COORDINATOR)
            if self._awaited.get() is None:
                return False
        for index in range(self._run.spec.servers):
            self._start(index)
        return all(self._awaited.get() is not None for _ in range(self._run.spec.servers))

    def for_workers(self, config: RunConfig) -> RunConfig:
        """The same with the addresses of servers, and of the coordinator."""
        if not self._run.spec.servers:
            return config
        found = [self._addresses[index] for index in range(self._run.spec.servers)]
        if self._run.spec.replication.is_on:  # one that starts again may be on another host
            found = [replace(server, local="") for server in found]
        config = replace(config, servers=tuple(server.encode() for server in found))
        return self._with_coordinator(config)

    def _start(self, index: int) -> None:
        machine = self._hosts[index]
        self._exited.pop(index, None)
        self._agent_of[index] = self._start_agent(
            machine,
            self._task(index, machine),
            lambda line: self._take(index, line),
            lambda status: self._end(index, status),
        )

    def _task(self, index: int, machine: Machine) -> messages.ServerTask:
        run = self._run
        spec = self._run.spec
        server = max(0, index)
        config = run.server_config(self._with_coordinator(spec.config), server)
        return messages.ServerTask(
            role="coordinator" if index == COORDINATOR else "server",
            folder=str(Path.cwd()),
            variables=run.variables(machine, config),
            secret=run.secret.hex(),
            address=machine.address,
            index=server,
            servers=spec.servers,
        )

    def _with_coordinator(self, config: RunConfig) -> RunConfig:
        found = self._addresses.get(COORDINATOR)
        return config if found is None else replace(config, coordinator=found.remote)

    def kill(self, index: int) -> None:
        """For --kill: a server ends with its agent."""
        agent = self._agent_of.get(index)
        if agent is not None:
            agent.send_signal(signal.SIGKILL)

    def start_again(self, rank: int) -> None:
        self._in_background(f"shoal-server-{rank}", lambda: self._find_and_start(rank))

    def _find_and_start(self, index: int) -> None:
        before = self._hosts[index]
        try:
            self._hosts[index] = self._run.machines.replacement(before, (), self._over)
            if self._over.is_set():
                return
            if self._hosts[index] != before:
                where = f"starts again on {self._hosts[index].name}"
                self._run.say(f"{self._run.spec.replication.in_words(index)} {where}")
            self._show(index)
            self._start(index)
        except BadInput as error:
            self._run.say(f"server {index}: {error}")
            self._note_exit(index, -signal.SIGKILL)

    # ------------------------------------------------------------------ what agents report

    def _show(self, index: int) -> None:
        role, number = ("coordinator", None) if index == COORDINATOR else ("server", index)
        shown = role if number is None else f"{role} {number}"
        self._output[index] = self._streams(shown, self._hosts[index], role, number)

    def _take(self, index: int, line: str) -> None:
        message = messages.read_message(line, index)
        if isinstance(message, messages.ProcessOutput):
            self._feed(self._output[index][message.is_stderr], message.text)
        elif isinstance(message, messages.ServerListens):
            host = self._run.host_id(self._hosts[index])
            self._addresses[index] = LaunchedServer(message.remote, message.local, host)
            if index != COORDINATOR:
                self.policy.started(index, message.pid)
            self._awaited.put(index)
        elif isinstance(message, messages.ChainsChanged):
            self.policy.see(message.listing)
        elif isinstance(message, messages.ProcessEnded):
            self._exited[index] = message.returncode
        elif isinstance(message, messages.HostRefused):
            self._feed(self._output[index][1], f"shoal: {message.sentence}\n")
            self._exited[index] = 2

    def _end(self, index: int, status: int) -> None:
        """An agent that was killed takes its server with it."""
        returncode = self._exited.get(index, status or -signal.SIGKILL)
        if index != COORDINATOR:
            self._note_exit(index, returncode)
        elif not self._run.run_dir.ending.exists():
            self._run.say("the coordinator is lost: no server that is lost can be replaced now")

    def _note_exit(self, index: int, returncode: int) -> None:
        self._run.events.put(ProcessExit(index, returncode, time.monotonic_ns(), "server"))
        self.end_start()
