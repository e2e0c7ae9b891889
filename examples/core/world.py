"""Ranks: threads that share nothing but mailboxes.

In the package a rank is a process, and a message goes through shared memory, TCP or NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class World:
    """A mailbox for each pair of ranks. For real: shoal/comm/transport/transport.py."""

    def __init__(self, size: int) -> None:
        self.size = size
        ranks = range(size)
        self._mail: dict[tuple[int, int], SimpleQueue[Any]] = {
            (source, target): SimpleQueue() for source in ranks for target in ranks
        }

    def send(self, source: int, target: int, message: Any) -> None:
        """Never waits. A tensor that is sent must not change: senders clone what they reuse."""
        self._mail[source, target].put(message)

    def receive(self, source: int, target: int) -> Any:
        """Waits for the next message of this pair; a rank that failed is known by its error."""
        message = self._mail[source, target].get()
        if isinstance(message, BaseException):
            raise RuntimeError(
                f"rank {target} waits for rank {source}, and a rank failed"
            ) from message
        return message

    def fail(self, error: BaseException) -> None:
        """No rank waits for ever: one that receives from now on sees what went wrong."""
        for mailbox in self._mail.values():
            mailbox.put(error)


def run_ranks(world: World, work: Callable[[int], Result]) -> list[Result]:
    """What `work(rank)` returns, by rank. For real: shoal/launch/here/supervisor.py."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            world.fail(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world.size)]
