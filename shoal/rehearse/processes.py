"""Virtual processes: fibers that end together, as those of a process that exits or is killed.

kill        nothing of it runs any more; what it had sent still arrives, then its connections end
its peers   read the end of a connection, or lose it in a collective that waits for it
supervisor  gets its exit at that moment, and decides as it does for a run (`launch/here`)
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from shoal.launch.here.output import LineForwarder, discard_lines
from shoal.launch.here.processes import Role
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.sockets import VirtualProcess, VirtualSockets
from shoal.rehearse.virtual_time import VirtualTime

KILLED = -int(signal.SIGKILL)
_SIGNAL_S = 0.001


class VirtualProcesses:
    """Those that run, by their names: "worker 2", "server 1"."""

    def __init__(self, time: VirtualTime, sockets: VirtualSockets):
        self.time = time
        self._sockets = sockets
        self.running: dict[str, VirtualProcess] = {}

    def start(
        self,
        name: str,
        device: int,
        body: Callable[[], int],
        exited: Callable[[int], None],
        worker: RandomState | None = None,
    ) -> None:
        """`body` returns its exit status; `exited` is called with it, however it ends."""
        process = self.running[name] = VirtualProcess(name, device, exited)
        self.time.spawn(name, lambda: self._end(process, body()), worker, group=process)

    def kill(self, name: str, status: int = KILLED) -> None:
        """One that kills its own process ends where it waits next, or calls `clock.check`."""
        if (process := self.running.get(name)) is not None:
            self._end(process, status)

    def _end(self, process: VirtualProcess, status: int) -> None:
        process.is_dead = True
        if self.running.get(process.name) is process:
            self.running.pop(process.name)
            self._sockets.end(process)
            process.exited(status)
            self.time.end_group(process)


class VirtualRole:
    """The workers or the servers of a rehearsal, as a supervisor has those of a run."""

    def __init__(
        self, role: Role, count: int, processes: VirtualProcesses, start: Callable[[int], None]
    ):
        """`start(rank)`: another process in the place of one that was lost."""
        self._role = role
        self._processes = processes
        self.start_again = start
        self.note_exit: Callable[[int], None] = lambda rank: None
        self.stderr = [LineForwarder(discard_lines, "", True)] * count

    def signal(self, number: signal.Signals) -> None:
        """It takes a moment. Servers that are asked to end do so with success."""
        status = 0 if self._role == "server" else -int(number)
        time = self._processes.time
        for name in [name for name in self._processes.running if name.startswith(self._role)]:
            time.at(time.now_s + _SIGNAL_S, partial(self._processes.kill, name, status))

    signal_alone = signal

    def host_of(self, rank: int) -> str:
        return ""
