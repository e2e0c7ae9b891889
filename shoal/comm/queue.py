"""Operations in the order in which they were asked for, whoever waits first.

All ranks ask for the same operations in the same order, but they may wait in different orders.
So whoever waits for one operation first carries out all that were asked for before it. In the
background a thread of its own does that: it begins at once, and goes when nothing is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class QueuedWork:
    """One operation; `wait` returns when it is done, or raises what went wrong."""

    def __init__(self, queue: OrderedQueue, run: Callable[[], None]):
        self._queue = queue
        self._run = run
        self._done = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        self._queue.carry_out(self)
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait_for_others(self) -> None:
        self._done.wait()

    def execute(self) -> None:
        """Run it, once; what goes wrong is kept for the one who waits."""
        try:
            self._run()
        except Exception as error:
            self._error = error
        finally:
            self._done.set()
            del self._run


class OrderedQueue:
    """Safe to use from several threads; one of them works at a time."""

    def __init__(self, background: bool = False) -> None:
        self._background = background
        self._waiting: deque[QueuedWork] = deque()
        self._working = threading.RLock()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, run: Callable[[], None]) -> QueuedWork:
        work = QueuedWork(self, run)
        with self._changing:
            self._waiting.append(work)
            if self._background and self._thread is None:
                self._thread = threading.Thread(target=self._empty, daemon=True, name="collectives")
                self._thread.start()
        return work

    def carry_out(self, work: QueuedWork) -> None:
        """Return when `work` is done, and with it all that came before."""
        if self._background:
            work.wait_for_others()
            return
        with self._working:
            while not work.done:
                self._waiting.popleft().execute()

    def _empty(self) -> None:
        while (work := self._next()) is not None:
            work.execute()

    def _next(self) -> QueuedWork | None:
        with self._changing:
            if self._waiting:
                return self._waiting.popleft()
            self._thread = None
            return None
