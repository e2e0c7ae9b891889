"""Hosts that an engine lends: the seam between a run and the lab, Ray, or another engine.

    run_remote ── Machines.hosts(8)            which hosts, and how many workers each takes
               ── Machines.server_hosts(…)     a host for each server, and for the coordinator
               ── Machines.start(host, …)      agents on them (launch/hosts/agent.py)
                        │ stdin    what to run, and the secret of the run
                        └ on_line  what the agent reports: output, progress, exits

An engine is a class with these methods, and a line in `commands/launching.py`.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import BadInput
from shoal.launch.here.process_config import Replication
from shoal.runtime.parent_death import in_child
from shoal.runtime.wording import counted


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


@dataclass(frozen=True)
class HostProgram:
    """A Python program that a host runs: `command[0]` is the interpreter of this process.

    It reads `given` at its stdin, up to the end. No other user may read those bytes, so they
    do not go through arguments, variables or files that others can open. Every line of its
    stdout and stderr is handed to `on_line`, in order, without its newline, from one thread.
    `environ` are the variables of this process; another computer may have its own instead.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    given: bytes
    on_line: Callable[[str], None]


class MachineProcess(Protocol):
    """One process that was started on a host."""

    def wait(self) -> int:
        """Its exit status, as in Popen: -9 for SIGKILL; after its last line was handed over.

        One thread calls it. A host that is gone counts as -9.
        """

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing if it has exited. An agent lets its workers save and end on SIGUSR1, and ends
        them on SIGTERM; SIGKILL ends it and what it has started, at once.
        """


class Machines(AbstractContextManager["Machines"], Protocol):
    """A block: at its end every process that it started is gone, and what it made is removed."""

    @property
    def is_private(self) -> bool:
        """Whether no other user can read what its hosts send to each other."""

    def hosts(self, workers: int) -> Sequence[Machine]:
        """Hosts with slots for so many workers, in the order in which ranks are placed.

        BadInput where there are not enough.
        """

    def server_hosts(self, servers: int, replication: Replication) -> ServerHosts:
        """After `hosts`: copies of a shard are on different hosts where that is possible."""

    def listen(self) -> socket.socket:
        """A socket that listens where processes on the hosts reach this one; for elastic runs."""

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        """A host for a worker or server that was on `machine`; waits for one, but not once `over`.

        `lost` has the names of all hosts that are lost. BadInput where there is no other one.
        """

    def start(self, machine: Machine, program: HostProgram) -> MachineProcess: ...

    def __enter__(self) -> Machines: ...


@dataclass(frozen=True)
class PlacedRanks:
    """Neighbouring ranks on one host."""

    machine: Machine
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def place_evenly(machines: Sequence[Machine], started: int, workers: int) -> list[PlacedRanks]:
    """The first workers evenly over the hosts; those that come later, in the slots that are left.

    For 3 of 6 workers on 3 hosts: ranks 0 | 1 | 2, later 3 | 4 | 5. Where all start at once, hosts
    are filled one after the other. BadInput where there are more workers than slots.
    """
    slots = [machine.slots for machine in machines]
    if sum(slots) < workers:
        room = f"{counted(sum(slots), 'worker')} on {counted(len(machines), 'host')}"
        raise BadInput(f"there is room for {room}, not for {workers}")
    if started == workers:
        before = [sum(slots[:host]) for host in range(len(slots))]
        filled = [min(n, max(0, workers - b)) for n, b in zip(slots, before, strict=True)]
        return _blocks(machines, filled)
    early = _evenly(slots, started)
    late = [most - few for most, few in zip(_evenly(slots, workers), early, strict=True)]
    return [*_blocks(machines, early), *_blocks(machines, late, started)]


def _evenly(slots: Sequence[int], workers: int) -> list[int]:
    """One worker at a time, where the fewest are."""
    counts = [0] * len(slots)
    for _ in range(workers):
        hosts = [host for host, most in enumerate(slots) if counts[host] < most]
        counts[min(hosts, key=lambda host: counts[host])] += 1
    return counts


def _blocks(
    machines: Sequence[Machine], counts: Sequence[int], first: int = 0
) -> list[PlacedRanks]:
    placed: list[PlacedRanks] = []
    for machine, count in zip(machines, counts, strict=True):
        if count > 0:
            placed.append(PlacedRanks(machine, first, count))
            first += count
    return placed


class HostProcess:
    """It leads a session of its own, and is killed when this process ends.

    The kernel kills it with the thread that has started it: that one stays until it has exited.
    """

    def __init__(self, program: HostProgram, on_end: Callable[[int], None] = lambda status: None):
        """`on_end` is called with its exit status, after its last line."""
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

        def serve() -> None:
            try:
                process = subprocess.Popen(
                    program.command,
                    env=program.environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=in_child(os.getpid()),
                )
            except OSError as error:
                started.put(error)
                return
            started.put(process)
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    program.on_line(line.decode("utf-8", "backslashreplace").removesuffix("\n"))
            on_end(process.wait())

        self._thread = threading.Thread(target=serve, name="shoal-host-process", daemon=True)
        self._thread.start()
        process = started.get()
        if isinstance(process, OSError):
            raise BadInput(f"cannot start {program.command[0]}: {process.strerror}") from process
        self._process = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:  # it has exited: `wait` says how
            stdin.write(program.given)

    def wait(self) -> int:
        """After its last line."""
        self._thread.join()
        return self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """SIGKILL to its group; what it has started in others dies with it, if it asked for."""
        if number != signal.SIGKILL:
            self._process.send_signal(number)
        elif self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
