"""A process of an agent's host whose lines are asked for, not handed over: for Ray actors.

launcher   start ── read, read, read … ── terminate, kill
here       HostProcess: its lines, at most 1 MiB of them, and its exit status

Every call names the process that it is for. An actor that Ray has restarted, or that runs another
process by now, may get a call that was meant for an earlier one: that one counts as killed.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from shoal.errors import BadInput
from shoal.launch.hosts.machines import HostProcess

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
        self._thread: threading.Thread | None = None

    def start(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], given: bytes
    ) -> None:
        """BadInput where it cannot be started. An earlier process is killed first."""
        self.end()
        with self._changed:
            self._name = name
            self._lines.clear()
            self._chars, self._returncode, self._is_dropped = 0, None, False
            self._changed.notify_all()
        started: queue.SimpleQueue[BadInput | None] = queue.SimpleQueue()
        # The kernel kills the process with the thread that has started it: that thread stays.
        self._thread = threading.Thread(
            target=self._serve,
            args=(command, environ, given, started),
            name="shoal-process",
            daemon=True,
        )
        self._thread.start()
        error = started.get()
        if error is not None:
            raise error

    def read(self, name: str, wait_s: float) -> tuple[list[str], int | None]:
        """Its lines since the last call, and after the last line its exit status.

        Waits for something to tell, at most for so long.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(name), wait_s)
            if name != self._name:
                return [], -signal.SIGKILL
            lines = list(self._lines)
            self._lines.clear()
            self._chars = 0
            self._changed.notify_all()
            return lines, self._returncode

    def _has_news(self, name: str) -> bool:
        return bool(name != self._name or self._lines or self._returncode is not None)

    def preempt(self, name: str) -> None:
        if process := self._running(name):
            process.preempt()

    def terminate(self, name: str) -> None:
        if process := self._running(name):
            process.terminate()

    def kill(self, name: str) -> None:
        if process := self._running(name):
            process.kill()

    def _running(self, name: str) -> HostProcess | None:
        with self._changed:
            return self._process if name == self._name else None

    def end(self) -> None:
        """Kill it, and return when it is gone."""
        with self._changed:
            self._is_dropped = True
            self._changed.notify_all()
        self.kill(self._name)
        if self._thread is not None:
            self._thread.join()

    def _serve(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        started: queue.SimpleQueue[BadInput | None],
    ) -> None:
        try:
            self._process = HostProcess(command, environ, given, self._put)
        except BadInput as error:
            started.put(error)
            return
        started.put(None)
        returncode = self._process.wait()
        with self._changed:
            self._process = None
            self._returncode = returncode
            self._changed.notify_all()

    def _put(self, line: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._chars < _BUFFERED_CHARS or self._is_dropped)
            self._lines.append(line)
            self._chars += len(line)
            self._changed.notify_all()
