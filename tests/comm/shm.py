"""Ranks of a shared-memory group as threads, and as processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.group import Group
from shoal.comm.select import exchange_over
from shoal.transport.shm.segment import join
from tests.comm.threads import Ranks, Table
from tests.comm.torch_ranks import forked_ranks

T = TypeVar("T")
SMALL_SLOTS = 4096


def memory_of(group: Group) -> SharedMemory:
    assert isinstance(group.executor, SharedMemory)
    return group.executor


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


def on_shm_processes(size: int, body: Callable[[Group], Any]) -> list[Any]:
    """What `body` gives in processes that are one group, by rank; None of one that is killed."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:

        def main(rank: int) -> Any:
            store = dist.FileStore(f"{folder}/store", size)
            segment = join(exchange_over(store, rank, size), rank, size, 30.0)
            assert segment is not None
            group = Group(SharedMemory(segment))
            found = body(group)
            group.close()
            return found

        found = forked_ranks(main, size, 300.0)
    assert set(os.listdir("/dev/shm")) == before
    return found
