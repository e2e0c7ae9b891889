"""A barrier that tells which ranks did not reach it.

rank 0         receives a token of every rank, then sends one to every rank
other ranks    send their token, then wait for that of rank 0
"""

from __future__ import annotations

import time

import torch

from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.executors.hierarchical.point_to_point import reserved_tag
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.errors import PeerLost

_SHORTEST_WAIT_S = 0.001


def monitored_barrier(
    executor: SharedMemory | Hierarchical, number: int, limit_s: float, wait_all_ranks: bool
) -> None:
    """`number` counts the barriers of the group. The texts are those of torch.distributed."""
    tag = reserved_tag(number)
    if executor.rank:
        _report(executor, tag, limit_s)
        return
    missing = _missing(executor, tag, limit_s, wait_all_ranks)
    if missing:
        ranks = ", ".join(str(rank) for rank in missing)
        raise RuntimeError(
            f"{'Ranks' if wait_all_ranks else 'Rank'} {ranks} failed to pass monitoredBarrier "
            f"in {limit_s * 1e3:.0f} ms"
        )
    token = torch.zeros(1)
    for message in [executor.send(token, peer, tag) for peer in range(1, executor.size)]:
        message.wait(limit_s)


def _report(executor: SharedMemory | Hierarchical, tag: int, limit_s: float) -> None:
    sent = executor.send(torch.zeros(1), 0, tag)
    try:
        executor.recv(torch.zeros(1), 0, tag).wait(limit_s)
        sent.wait(limit_s)
    except PeerLost as error:
        raise RuntimeError(
            f"Rank {executor.rank} successfully reached monitoredBarrier, but received "
            f"errors while waiting for send/recv from rank 0: {error}"
        ) from error


def _missing(
    executor: SharedMemory | Hierarchical, tag: int, limit_s: float, wait_all_ranks: bool
) -> list[int]:
    missing: list[int] = []
    deadline_s = time.monotonic() + limit_s
    peers = range(1, executor.size)
    messages = [executor.recv(torch.zeros(1), peer, tag) for peer in peers]
    for peer, message in zip(peers, messages, strict=True):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 and not missing:
            raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {limit_s:g} s")
        try:
            message.wait(max(left_s, _SHORTEST_WAIT_S))
        except PeerLost:
            missing.append(peer)
            if not wait_all_ranks:
                break
    return missing
