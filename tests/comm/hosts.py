"""Ranks of several hosts as threads: who is where is said, memory and Gloo are real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.group import Group
from shoal.comm.network import HostNetwork, HostSpec
from shoal.comm.select import share_memory
from shoal.runtime.config import RunConfig
from tests.comm.threads import Ranks

T = TypeVar("T")


def on_hosts(
    where: Sequence[str],
    work: Callable[[Group], T],
    timeout_s: float = 20.0,
    between: str | None = None,
) -> list[T]:
    """What `work` gives on every rank; `where[r]` is the host of rank r."""
    network = HostNetwork(RunConfig(between=between))
    store = dist.HashStore()
    all_here = threading.Barrier(len(where))  # type: ignore[attr-defined]
    ranks = Ranks[T]()

    def main(rank: int) -> None:
        host = HostSpec(host_id=where[rank], network=network)
        executor = share_memory(store, rank, len(where), timeout_s, host)
        assert isinstance(executor, Hierarchical)
        group = Group(executor)
        try:
            ranks.results[rank] = work(group)
        except BaseException as error:
            ranks.failures.append(error)
        finally:
            all_here.wait()
            group.close()

    return ranks.run(len(where), main)
