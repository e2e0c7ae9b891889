"""One line where the start of a run takes long and nothing is printed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.launch.output import Write

SILENT_S = 3.0


class StartNotice:
    """Passes on what is written, and knows whether anything was."""

    def __init__(self, write: Write, silent_s: float = SILENT_S):
        self._write = write
        self._silent_s = silent_s
        self._is_heard = threading.Event()

    def write(self, text: str, is_stderr: bool) -> None:
        self._is_heard.set()
        self._write(text, is_stderr)

    @contextmanager
    def saying(
        self, line: str, say: Callable[[str], None], has_started: Callable[[], bool]
    ) -> Iterator[None]:
        """Around a run: `line` is said once it has been silent for a while and has not started."""

        def wait() -> None:
            if not self._is_heard.wait(self._silent_s) and not has_started():
                say(line)

        thread = threading.Thread(target=wait, name="shoal-start-notice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_heard.set()
            thread.join()


def starting(servers: int, workers: int) -> str:
    """`starting 3 servers and 1 worker`."""
    return f"starting {_count(servers, 'server')} and {_count(workers, 'worker')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
