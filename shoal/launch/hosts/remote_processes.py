"""Agents on the hosts of an engine, as processes of this launcher: started, signalled, waited for.

A thread for each agent waits for its exit. What agents print is handed on by one thread at a time.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from shoal.errors import BadInput
from shoal.launch.here.local import Run
from shoal.launch.here.output import LineForwarder
from shoal.launch.here.supervisor import TERM_S
from shoal.launch.hosts.agent_messages import Task
from shoal.launch.hosts.machines import Machine, MachineProcess, Machines
from shoal.runtime.config import RunConfig

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


Streams = tuple[LineForwarder, LineForwarder]  # stdout, stderr
_Processes = TypeVar("_Processes", bound="RemoteProcesses")


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
        self._starting_agent = threading.Lock()

    def _start_agent(
        self,
        machine: Machine,
        task: Task,
        on_line: Callable[[str], None],
        on_end: Callable[[int], None],
    ) -> MachineProcess | None:
        """It reads `task` at its stdin; `on_end` is called with its exit status, from a thread.

        At the end of the block nothing is started any more: None.
        """
        given = msgspec.json.encode(task)
        environ = self._run.spec.config.environ
        started: queue.SimpleQueue[BadInput | MachineProcess] = queue.SimpleQueue()

        def run() -> None:
            try:
                agent = self._run.machines.start(machine, AGENT_COMMAND, environ, given, on_line)
            except BadInput as error:
                started.put(error)
                return
            self._agents.append(agent)
            started.put(agent)
            on_end(agent.wait())

        with self._starting_agent:
            if self._over.is_set():
                return None
            # The kernel kills a process of this host with the thread that has started it.
            waiter = threading.Thread(target=run, name=f"shoal-wait-{machine.name}", daemon=True)
            self._waiters.append(waiter)
            waiter.start()
            agent = started.get()
        if isinstance(agent, BadInput):
            raise agent
        return agent

    def _in_background(self, name: str, start: Callable[[], None]) -> None:
        """An engine may need time for a host in place of one that is lost."""
        thread = threading.Thread(target=start, name=name, daemon=True)
        self._restarting.append(thread)
        thread.start()

    def _streams(self, name: str, machine: Machine, role: str, rank: int | None = None) -> Streams:
        """Stdout and stderr of a process; they are closed at the end of the block."""
        prefix = f"[{name} {machine.name}] "
        out, err = (self._run.forwarder(prefix, is_err, role, rank) for is_err in (False, True))
        self._forwarders += [out, err]
        return out, err

    def _feed(self, forwarder: LineForwarder, text: str) -> None:
        self._run.sink.call(lambda: forwarder.feed(text.encode()))

    def signal_alone(self, number: signal.Signals) -> None:
        """Only a preemption asks for it: workers agree on a step, save, and end by themselves."""
        for agent in list(self._agents):
            agent.preempt()

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM reaches the processes of agents through them."""
        for agent in list(self._agents):
            agent.kill() if number == signal.SIGKILL else agent.terminate()

    def __enter__(self: _Processes) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting_agent:
            self._over.set()
        self.signal(signal.SIGTERM)
        self._join()
        if any(waiter.is_alive() for waiter in self._waiters):
            self.signal(signal.SIGKILL)
        self._join()
        if not any(waiter.is_alive() for waiter in self._waiters):  # or one blocks in `write`
            for forwarder in self._forwarders:
                self._run.sink.call(forwarder.close)
        for thread in self._restarting:
            thread.join()

    def _join(self) -> None:
        deadline_s = time.monotonic() + _END_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline_s - time.monotonic()))
