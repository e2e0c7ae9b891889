"""Ranks as threads for the tests of groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.transport.shm.memfd import Exchange
from shoal.transport.threads import Mailboxes, ThreadTransport
from tests.cores import one_core

T = TypeVar("T")


class Ranks(Generic[T]):
    """Threads that are ranks: what each has found, and what went wrong, in the order of time."""

    def __init__(self) -> None:
        self.results: dict[int, T] = {}
        self.failures: list[BaseException] = []

    def run(self, size: int, main: Callable[[int], None]) -> list[T]:
        """What `main` has put into the results, by rank; the first failure is raised here."""
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
        with one_core():
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return [self.results[rank] for rank in range(size)]


class Table:
    """Where the threads of a world lay down what they say, and read what the others said."""

    def __init__(self, size: int):
        self._said: list[bytes] = [b""] * size
        self._all_here = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int) -> Exchange:
        def say(what: bytes) -> list[bytes]:
            self._said[rank] = what
            self._all_here.wait()
            everything = list(self._said)
            self._all_here.wait()
            return everything

        return say


def on_threads(size: int, work: Callable[[ThreadTransport], T], timeout_s: float = 20.0) -> list[T]:
    """What `work` gives on every rank; the first failure is raised here."""
    boxes = Mailboxes(size, timeout_s)
    ranks = Ranks[T]()

    def main(rank: int) -> None:
        try:
            ranks.results[rank] = work(ThreadTransport(boxes, rank))
        except BaseException as error:
            ranks.failures.append(error)
            boxes.break_all(rank)

    return ranks.run(size, main)
