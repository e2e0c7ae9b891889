"""A thread that carries out one thing after the other, beside the computation."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """It does not keep the process alive, so that a worker that fails can end at once."""

    def __init__(self, name: str):
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._todo = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._todo.put((future, action))
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """Returns when what was begun is done; its connection is closed by then, so it ends."""
        self._todo.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            future, action = item
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
            del future, action, item
