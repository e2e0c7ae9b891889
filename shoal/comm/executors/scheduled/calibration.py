"""What a message costs here: alpha, beta and gamma, by ping-pong between ranks 0 and 1."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.schedules.collectives.cost import Link
from shoal.transport.transport import Transport

_SMALL = 8
_LARGE = 1 << 20
_TRIES = 5


def measure_link(transport: Transport, tag: int, broadcast: Callable[[Tensor], None]) -> Link:
    """All ranks call it. `broadcast` goes from rank 0, so that all ranks use the same numbers.

    Two sizes, the best of a few tries each: alpha is the time of the small message, beta what
    every further byte adds, gamma the time to add a byte to another. A few milliseconds.
    """
    measured = torch.zeros(3, dtype=torch.float64)
    if transport.size > 1 and transport.rank < 2:
        small_s, large_s = (_one_way_s(transport, tag, size) for size in (_SMALL, _LARGE))
        beta = max(large_s - small_s, 0.0) / (_LARGE - _SMALL)
        measured = torch.tensor([small_s, beta, _gamma()], dtype=torch.float64)
    broadcast(measured)
    alpha_s, beta, gamma = measured.tolist()
    return Link(alpha_s, beta, gamma)


def _one_way_s(transport: Transport, tag: int, num_bytes: int) -> float:
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    peer = 1 - transport.rank
    return min(_ping_pong_s(transport, tag, data, peer) for _ in range(_TRIES)) / 2


def _ping_pong_s(transport: Transport, tag: int, data: Tensor, peer: int) -> float:
    start = time.perf_counter()
    if transport.rank == 0:
        transport.send(data, peer, tag).wait()
        transport.recv(data, peer, tag).wait()
    else:
        transport.recv(data, peer, tag).wait()
        transport.send(data, peer, tag).wait()
    return time.perf_counter() - start


def _gamma() -> float:
    total = torch.zeros(_LARGE // 4)
    other = torch.zeros(_LARGE // 4)
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        total.add_(other)
        best = min(best, time.perf_counter() - start)
    return best / _LARGE
