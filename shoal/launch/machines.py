"""Hosts that an engine lends: the seam between a run and the lab, Ray, or another engine.

    run_remote ── Machines.hosts(8)            which hosts, and how many workers each takes
               ── Machines.server_hosts(…)     a host for each server, and for the coordinator
               ── Machines.start(host, …)      agents on them (launch/agent.py, server_agent.py)
                        │ stdin    what to run, and the secret of the run
                        └ on_line  what the agent reports: output, progress, exits

An engine is a class with these methods, and a line in `commands/engines.py`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from shoal.launch.replication import Replication


@dataclass(frozen=True)
class Machine:
    """One host that an engine lends."""

    name: str  # as shown in output and errors
    address: str  # by which the others reach it
    slots: int  # workers that it takes at most
    cores: int | None = None  # of which its workers get equal shares; None: all that it has
    rack: str = ""  # by any name; empty where the engine does not know
    reserved: str = ""  # what the engine has reserved there for one server, by its own name


@dataclass(frozen=True)
class ServerHosts:
    """Where servers run, by their number, and their coordinator, if they have replicas."""

    servers: tuple[Machine, ...]
    coordinator: Machine | None = None


def servers_in_turn(
    hosts: Sequence[Machine], servers: int, replication: Replication
) -> ServerHosts:
    """On hosts in turn, copies of a shard on different ones; the coordinator on the first."""
    copies = replication.replicas
    numbers = [sum(divmod(server, copies)) % len(hosts) for server in range(servers)]
    chosen = tuple(hosts[number] for number in numbers)
    return ServerHosts(chosen, hosts[0] if replication.is_on else None)


class MachineProcess(Protocol):
    """One process that was started on a host."""

    def wait(self) -> int:
        """Its exit status, as in Popen: -9 for SIGKILL; after its last line was handed over.

        One thread calls it. A host that is gone counts as -9.
        """
        ...

    def preempt(self) -> None:
        """SIGUSR1, on which an agent lets its workers save and end; nothing if it has exited."""
        ...

    def terminate(self) -> None:
        """SIGTERM, on which an agent ends its workers; nothing if it has exited."""
        ...

    def kill(self) -> None:
        """SIGKILL to it and to what it has started, at once."""
        ...


class Machines(Protocol):
    """A block: at its end every process that it started is gone, and what it made is removed."""

    @property
    def is_private(self) -> bool:
        """Whether no other user can read what its hosts send to each other."""
        ...

    def hosts(self, workers: int) -> Sequence[Machine]:
        """Hosts with slots for so many workers, in the order in which ranks are placed.

        BadInput where there are not enough.
        """
        ...

    def server_hosts(self, servers: int, replication: Replication) -> ServerHosts:
        """After `hosts`: copies of a shard are on different hosts where that is possible."""
        ...

    def find_again(self, machine: Machine, over: threading.Event) -> Machine:
        """Where a server of this host, which may be lost, is to start again.

        Waits for the engine to find one, but not once the run is over.
        """
        ...

    def listen(self) -> socket.socket:
        """A socket that listens where processes on the hosts reach this one; for elastic runs."""
        ...

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        """A host for one worker that was on `machine`; waits until there is one, or it is `over`.

        `lost` has the names of all hosts that are lost. BadInput where there is no other one.
        """
        ...

    def start(
        self,
        machine: Machine,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ) -> MachineProcess:
        """Start a Python program: `command[0]` is the interpreter of this process.

        It reads `given` at its stdin, up to the end. No other user may read those bytes, so they
        do not go through arguments, variables or files that others can open. Every line of its
        stdout and stderr is handed to `on_line`, in order, without its newline, from one thread.
        `environ` are the variables of this process; another computer may have its own instead.
        """
        ...

    def __enter__(self) -> Machines: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
