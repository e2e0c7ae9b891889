"""Servers of a run on hosts that an engine lends, and their coordinator: started, replaced, ended.

    RemoteServers ── an agent for each server ──────── python -m shoal.server.main
                  ── an agent for the coordinator ──── python -m shoal.coordinator.main

Workers start while servers load: an agent says at once where its server is going to listen. A
server that is lost is started again where the engine says, in the background; the others, and
workers, find it through the coordinator.
"""

from __future__ import annotations

import queue
import signal
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.errors import BadInput
from shoal.launch.here.output import LineForwarder
from shoal.launch.here.process_config import server_config
from shoal.launch.here.processes import ProcessExit
from shoal.launch.hosts.agent_messages import (
    ChainsChanged,
    HostRefused,
    ProcessOutput,
    ServerExited,
    ServerListens,
    ServerTask,
    read_message,
)
from shoal.launch.hosts.machines import Machine, ServerHosts
from shoal.launch.hosts.remote_processes import RemoteProcesses, RemoteRun, Streams
from shoal.launch.losses.chain_members import ChainMembers
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.protocol.endpoint import require_encrypted
from shoal.runtime.config import RunConfig
from shoal.runtime.variables import LaunchedServer

COORDINATOR = -1  # its number among the servers


class RemoteServers(RemoteProcesses):
    """All servers, and their coordinator as number -1."""

    def __init__(self, run: RemoteRun, hosts: ServerHosts):
        super().__init__(run)
        self._hosts = dict(enumerate(hosts.servers))
        if hosts.coordinator is not None:
            self._hosts[COORDINATOR] = hosts.coordinator
        self._listening: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # None: it ends
        self._addresses: dict[int, LaunchedServer] = {}
        self._exited: dict[int, int] = {}
        spec = run.spec
        self.members = ChainMembers(spec.replication, spec.servers, run.say, are_here=False)
        self.policy = ServerPolicy(
            spec.servers, spec.replication, run.say, self.members, spec.config.server_checkpoint
        )
        self._output: dict[int, Streams] = {}
        for index in self._hosts:
            self._show(index)

    def host_of(self, index: int) -> str:
        return self._hosts[index].name

    @property
    def stderr(self) -> list[LineForwarder]:
        return [self._output[index][1] for index in range(self._run.spec.servers)]

    # ------------------------------------------------------------------ starting

    def start_all(self) -> bool:
        """False where something has ended the start."""
        self._check_network()
        if COORDINATOR in self._hosts:
            self._start(COORDINATOR)
            if self._listening.get() is None:
                return False
        for index in range(self._run.spec.servers):
            self._start(index)
        return all(self._listening.get() is not None for _ in range(self._run.spec.servers))

    def _check_network(self) -> None:
        """BadInput before any server is started, where each of them would refuse to listen."""
        tls = self._run.spec.config.tls
        if tls.certificate or self._run.machines.is_private:
            return
        for machine in self._hosts.values():
            require_encrypted(machine.address, tls)

    def end_start(self) -> None:
        """From another thread, or a signal handler."""
        self._listening.put(None)

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
        self._start_agent(
            machine,
            self._task(index, machine),
            lambda line: self._take(index, line),
            lambda status: self._end(index, status),
        )

    def _task(self, index: int, machine: Machine) -> ServerTask:
        run = self._run
        spec = run.spec
        config = self._with_coordinator(spec.config)
        if index in self._addresses:  # another one takes its place
            config = replace(config, failpoints=())
        server = max(0, index)
        counts = (spec.workers, spec.servers, spec.replication)
        config = server_config(config, run.run_dir, server, *counts)
        return ServerTask(
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

    def start_again(self, rank: int) -> None:
        self._in_background(f"shoal-server-{rank}", lambda: self._find_and_start(rank))

    def note_exit(self, rank: int) -> None:
        """Other servers learn of it through the coordinator."""

    def _find_and_start(self, index: int) -> None:
        before = self._hosts[index]
        try:
            self._hosts[index] = self._run.machines.find_again(before, self._over)
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
        is_server = index != COORDINATOR
        names = ("server", index) if is_server else ("coordinator", None)
        shown = f"server {index}" if is_server else "coordinator"
        self._output[index] = self._streams(shown, self._hosts[index], *names)

    def _take(self, index: int, line: str) -> None:
        try:
            message = read_message(line)
        except msgspec.DecodeError:  # an error of the interpreter, or of the engine
            message = ProcessOutput(index, True, f"{line}\n")
        if isinstance(message, ProcessOutput):
            self._feed(self._output[index][message.is_stderr], message.text)
        elif isinstance(message, ServerListens):
            self._listens(index, message)
        elif isinstance(message, ChainsChanged):
            self.members.see(message.listing)
        elif isinstance(message, ServerExited):
            self._exited[index] = message.returncode
        elif isinstance(message, HostRefused):
            self._feed(self._output[index][1], f"shoal: {message.sentence}\n")
            self._exited[index] = 2

    def _listens(self, index: int, message: ServerListens) -> None:
        host = self._run.host_id(self._hosts[index])
        self._addresses[index] = LaunchedServer(message.remote, message.local, host)
        if index != COORDINATOR:
            self.policy.started(index, message.pid)
        self._listening.put(index)

    def _end(self, index: int, status: int) -> None:
        """An agent that was killed takes its server with it."""
        returncode = self._exited.get(index, status or -signal.SIGKILL)
        if index != COORDINATOR:
            self._note_exit(index, returncode)
        elif not self._run.run_dir.ending.exists():
            self._run.say("the coordinator is lost: no server that is lost can be replaced now")

    def _note_exit(self, index: int, returncode: int) -> None:
        self._run.events.put(ProcessExit(index, returncode, time.monotonic_ns(), "server"))
        self._listening.put(None)
