"""Ranks as threads for the tests of groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shoal.wire.threads import Mailboxes, ThreadTransport

T = TypeVar("T")


def on_threads(size: int, work: Callable[[ThreadTransport], T], timeout_s: float = 20.0) -> list[T]:
    """What `work` gives on every rank; the first failure is raised here."""
    boxes = Mailboxes(size, timeout_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = work(ThreadTransport(boxes, rank))
        except BaseException as error:
            failures.append(error)
            boxes.break_all(rank)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
