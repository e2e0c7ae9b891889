"""Operations in the order in which they were asked for, whoever waits first.

All ranks ask for the same operations in the same order, but they may wait in different orders.
So a rank that waits for one operation first carries out all that were asked for before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class QueuedWork:
    """One operation; `wait` returns when it is done, or raises what went wrong."""

    def __init__(self, queue: OrderedQueue, run: Callable[[], None]):
        self._queue, self._run = queue, run
        self._done = False
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._queue.drain_until(self)
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return self._done

    def execute(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._done = True
            del self._run


class OrderedQueue:
    """Safe to use from several threads; one of them works at a time."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedWork] = deque()
        self._working = threading.RLock()

    def submit(self, run: Callable[[], None]) -> QueuedWork:
        work = QueuedWork(self, run)
        self._waiting.append(work)
        return work

    def drain_until(self, work: QueuedWork) -> None:
        with self._working:
            while not work.done:
                self._waiting.popleft().execute()
