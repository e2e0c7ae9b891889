"""A collective is a table: in each round, who sends which chunk to whom, and what is done with it.

4 ranks, reduce-scatter                        then all-gather, the same way round
round 0   0 -c3-> 1 -c0-> 2 -c1-> 3 -c2-> 0
round 1   0 -c2-> 1 -c3-> 2 -c0-> 3 -c1-> 0    what has just arrived, and was added, goes on
round 2   0 -c1-> 1 -c2-> 2 -c3-> 3 -c0-> 0    so chunk 1 is complete at rank 1
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from examples.core.world import World


class Transfer(NamedTuple):
    """For real: shoal/schedules/collectives/transfer_table.py."""

    source: int
    target: int
    chunk: int
    is_added: bool  # to what the target has; otherwise it replaces it


Rounds = list[list[Transfer]]


def ring_reduce_scatter(ranks: int) -> Rounds:
    """Chunk r ends at rank r. For real: shoal/schedules/collectives/ring.py."""
    return [_round(ranks, shift=-1 - step, is_added=True) for step in range(ranks - 1)]


def ring_all_gather(ranks: int) -> Rounds:
    """Rank r begins with chunk r."""
    return [_round(ranks, shift=-step, is_added=False) for step in range(ranks - 1)]


def ring_all_reduce(ranks: int) -> Rounds:
    """2(p-1) rounds; each rank sends 2(p-1)/p of its vector, the least that is possible."""
    return ring_reduce_scatter(ranks) + ring_all_gather(ranks)


def _round(ranks: int, shift: int, is_added: bool) -> list[Transfer]:
    return [
        Transfer(rank, (rank + 1) % ranks, (rank + shift) % ranks, is_added)
        for rank in range(ranks)
    ]


def contributions(rounds: Rounds, ranks: int) -> list[list[Counter[int]]]:
    """What each rank's chunks are sums of: a proof without numbers.

    An all-reduce is right if every chunk of every rank has each rank's contribution once.
    For real: shoal/schedules/collectives/proof.py.
    """
    held = [[Counter({rank: 1}) for _ in range(ranks)] for rank in range(ranks)]
    for transfers in rounds:
        messages = [held[transfer.source][transfer.chunk].copy() for transfer in transfers]
        for transfer, message in zip(transfers, messages, strict=True):
            before = held[transfer.target][transfer.chunk] if transfer.is_added else Counter[int]()
            held[transfer.target][transfer.chunk] = before + message
    return held


def execute(rounds: Rounds, world: World, rank: int, vector: Tensor) -> None:
    """In place. For real: shoal/comm/executors/scheduled.py, and shoal/comm/transport/ in C."""
    chunks = vector.tensor_split(world.size)
    for transfers in rounds:
        for transfer in transfers:
            if transfer.source == rank:
                world.send(rank, transfer.target, chunks[transfer.chunk].clone())
        for transfer in transfers:
            if transfer.target == rank:
                message = world.receive(transfer.source, rank)
                chunk = chunks[transfer.chunk]
                chunk.copy_(chunk + message if transfer.is_added else message)
