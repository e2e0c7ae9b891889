"""Ranks of several hosts as threads: who is where is said, memory and Gloo are real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar
from unittest.mock import patch

import torch.distributed as dist

from shoal.comm import select as meeting
from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.group import Group
from tests.comm.threads import Ranks

T = TypeVar("T")


def on_hosts(where: Sequence[str], work: Callable[[Group], T], timeout_s: float = 20.0) -> list[T]:
    """What `work` gives on every rank; `where[r]` is the host of rank r."""
    store = dist.HashStore()
    all_here = threading.Barrier(len(where))  # type: ignore[attr-defined]
    own = threading.local()
    ranks = Ranks[T]()

    def main(rank: int) -> None:
        own.host = where[rank].encode()
        executor = meeting.share_memory(store, rank, len(where), timeout_s)
        assert isinstance(executor, Hierarchical)
        group = Group(executor)
        try:
            ranks.results[rank] = work(group)
        except BaseException as error:
            ranks.failures.append(error)
        finally:
            all_here.wait()
            group.close()

    with patch.object(meeting, "host_id", lambda: own.host):
        return ranks.run(len(where), main)
