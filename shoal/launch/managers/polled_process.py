"""A process of an agent's host whose lines are asked for, not handed over: for Ray actors.

launcher   start ── read, read, read … ── send_signal
here       HostProcess: its lines, at most 1 MiB of them, and its exit status

Every call names the process that it is for. An actor that Ray has restarted, or that runs another
process by now, may get a call that was meant for an earlier one: that one counts as killed.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from shoal.launch.hosts.machines import HostProcess, HostProgram

_BUFFERED_CHARS = 1024 * 1024  # the process waits when its lines are read more slowly


class PolledProcess:
    """At most one process at a time; methods are called from several threads."""

    def __init__(self) -> None:
        self._name = ""
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._chars = 0
        self._returncode: int | None = None
        self._is_dropped = False  # what it writes is not read any more
        self._process: HostProcess | None = None

    def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], given: bytes
    ) -> None:
        """BadInput where it cannot be started. An earlier process is killed first."""
        self.end()
        with self._changed:
            self._name = name
            self._lines.clear()
            self._chars = 0
            self._returncode = None
            self._is_dropped = False
            self._changed.notify_all()
        program = HostProgram(command, environ, given, self._put)
        self._process = HostProcess(program, self._note_end)

    def read(self, name: str, wait_s: float) -> tuple[list[str], int | None]:
        """Its lines since the last call, and after the last line its exit status.

        Waits for something to tell, at most for so long.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: name != self._name or self._lines or self._returncode is not None, wait_s
            )
            if name != self._name:
                return [], -signal.SIGKILL
            lines = list(self._lines)
            self._lines.clear()
            self._chars = 0
            self._changed.notify_all()
            return lines, self._returncode

    def send_signal(self, name: str, number: signal.Signals) -> None:
        if self._process is not None and name == self._name:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, and return when it is gone."""
        with self._changed:
            self._is_dropped = True
            self._changed.notify_all()
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _note_end(self, returncode: int) -> None:
        with self._changed:
            self._returncode = returncode
            self._changed.notify_all()

    def _put(self, line: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._chars < _BUFFERED_CHARS or self._is_dropped)
            self._lines.append(line)
            self._chars += len(line)
            self._changed.notify_all()
