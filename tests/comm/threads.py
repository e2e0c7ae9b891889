"""Ranks as threads: of mailboxes, of shared memory, of several hosts, and over TCP at loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.group import Group
from shoal.comm.network import HostNetwork
from shoal.comm.select import share_memory
from shoal.comm.transport.shm.memfd import Exchange
from shoal.comm.transport.shm.segment import join
from shoal.comm.transport.tcp.connect import TcpSpec
from shoal.comm.transport.tcp.transport import TcpEngine, TcpTransport
from shoal.runtime.config import RunConfig
from tests.cores import one_core

T = TypeVar("T")
KEY = b"k" * 32
SMALL_SLOTS = 4096


def on_ranks(size: int, main: Callable[[int], T]) -> list[T]:
    """What `main(rank)` gives on a thread, by rank; the first failure, by time, is raised here."""
    failures: list[BaseException] = []

    def guarded(rank: int) -> T:
        try:
            return main(rank)
        except BaseException as error:
            failures.append(error)
            raise

    with ThreadPoolExecutor(size) as pool, one_core():
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


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
    boxes = Mailboxes(size, timeout_s)

    def main(rank: int) -> T:
        try:
            return work(ThreadTransport(boxes, rank))
        except BaseException:
            boxes.break_all(rank)
            raise

    return on_ranks(size, main)


def on_shm_threads(size: int, work: Callable[[Group], T], slot_bytes: int = SMALL_SLOTS) -> list[T]:
    table = Table(size)

    def main(rank: int) -> T:
        segment = join(table.exchange(rank), rank, size, 20.0, slot_bytes)
        assert segment is not None
        group = Group(SharedMemory(segment))
        try:
            found = work(group)
            group.barrier().wait()
            return found
        finally:
            group.close()

    return on_ranks(size, main)


def memory_of(group: Group) -> SharedMemory:
    assert isinstance(group.executor, SharedMemory)
    return group.executor


def on_hosts(where: Sequence[str], work: Callable[[Group], T]) -> list[T]:
    """`where[r]` is the host of rank r, as it is said; memory and connections are real."""
    store = dist.HashStore()
    all_here = threading.Barrier(len(where))

    def main(rank: int) -> T:
        host = HostNetwork(RunConfig(host_id=where[rank]))
        executor = share_memory(store, rank, len(where), 20.0, host)
        assert isinstance(executor, Hierarchical)
        group = Group(executor)
        try:
            return work(group)
        finally:
            all_here.wait()
            group.close()

    return on_ranks(len(where), main)


def on_tcp(size: int, body: Callable[[TcpTransport], Any], **options: Any) -> list[Any]:
    """What `body` returned or raised, by rank. A rank that raises closes its connections."""
    table = Table(size)
    done = threading.Barrier(size)

    def main(rank: int) -> Any:
        engine = TcpEngine(TcpSpec(rank, size, KEY, **options), table.exchange(rank))
        try:
            found = body(TcpTransport(engine, timeout_s=20.0))
        except BaseException as error:
            found = error
            engine.close()
        done.wait(30)
        engine.close()
        return found

    return on_ranks(size, main)
