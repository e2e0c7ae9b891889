"""A process of this computer as a MachineProcess: for engines whose hosts are on it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from shoal.errors import BadInput
from shoal.runtime.parent_death import in_child


class HostProcess:
    """It leads a session of its own, and is killed when this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ):
        """Its stdin is `given`. Call it from a thread that lives as long as the process may."""
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child(os.getpid()),
            )
        except OSError as error:
            raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, name="shoal-host-output", daemon=True)
        self._reader.start()
        self._give(given)

    def _give(self, given: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it has exited: `wait` says how
            stdin.write(given)
        with suppress(BrokenPipeError):
            stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._on_line(line.decode("utf-8", "backslashreplace").removesuffix("\n"))

    def wait(self) -> int:
        """After its last line."""
        self._reader.join()
        return self._process.wait()

    def preempt(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """It and its group; what it has started in other groups dies with it, if it asked for."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
