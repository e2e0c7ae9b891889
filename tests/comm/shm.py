"""Ranks of a shared-memory group as threads, and as processes."""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.group import Group
from shoal.transport.shm.memfd import Exchange
from shoal.transport.shm.segment import join
from tests.comm.threads import Ranks

T = TypeVar("T")
SMALL_SLOTS = 4096


def memory_of(group: Group) -> SharedMemory:
    assert isinstance(group.executor, SharedMemory)
    return group.executor


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


def on_shm_threads(size: int, work: Callable[[Group], T], slot_bytes: int = SMALL_SLOTS) -> list[T]:
    """What `work` gives on every rank; the first failure is raised here."""
    table = Table(size)
    ranks = Ranks[T]()

    def main(rank: int) -> None:
        segment = join(table.exchange(rank), rank, size, 20.0, slot_bytes)
        assert segment is not None
        group = Group(SharedMemory(segment))
        try:
            ranks.results[rank] = work(group)
            group.barrier().wait()
        except BaseException as error:
            ranks.failures.append(error)
        finally:
            group.close()

    return ranks.run(size, main)


class ShmWorld:
    """Processes that are one group; each runs `body(group)` and answers with what it gives."""

    def __init__(self, size: int, body: Callable[[Group], Any]):
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, size, theirs, body), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        for _ in range(2):  # `join` exchanges twice
            said = [pipe.recv() for pipe in self.pipes]
            for pipe in self.pipes:
                pipe.send(said)

    def answer(self, rank: int, timeout_s: float = 300.0) -> Any:
        """What the body gave, or the text of what it raised."""
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _serve(rank: int, size: int, pipe: Connection, body: Callable[[Group], Any]) -> None:
    def exchange(said: bytes) -> list[bytes]:
        pipe.send(said)
        return pipe.recv()  # type: ignore[no-any-return]

    segment = join(exchange, rank, size, 30.0)
    assert segment is not None
    group = Group(SharedMemory(segment))
    try:
        pipe.send(body(group))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    group.close()
