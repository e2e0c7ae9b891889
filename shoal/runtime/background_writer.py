"""What is written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.runtime import clock


class BackgroundWriter:
    """Runs one action at a time in a thread. A process that ends does not wait for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, action: Callable[[], None]) -> None:
        """Only while it is not busy."""
        name = "shoal-checkpoint"
        self._thread = clock.Thread(target=self._in_thread, args=(action,), name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Return when nothing is being written."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def wait(self) -> None:
        """The same; raises the error of the latest action, once."""
        self.join()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._error = error

    def _in_thread(self, action: Callable[[], None]) -> None:
        self._run(action)
        self._thread = None  # a virtual one knows the whole rehearsal
