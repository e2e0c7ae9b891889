"""The schedule of ring attention: proven, and what it takes."""

from __future__ import annotations

from collections import Counter
from itertools import product

from shoal.errors import CheckFailed
from shoal.schedules.collectives.cost import Link, traffic
from shoal.schedules.collectives.proof import prove as prove_collective
from shoal.schedules.ring_attention import RingAttention


def work(schedule: RingAttention, rank: int) -> list[float]:
    """Pairs of chunks that a rank computes in each round; the diagonal counts half."""
    blocks = [(rank - k) % schedule.ranks for k in range(schedule.ranks)]
    return [sum(0.5 if p.diagonal else 1.0 for p in schedule.pairs(rank, b)) for b in blocks]


def time_s(schedule: RingAttention, block_bytes: float, pair_s: float, link: Link) -> float:
    """Forward: each round takes the longer of its transfer and its slowest rank's computing."""
    ranks = range(schedule.ranks)
    busiest = [max(row) for row in zip(*(work(schedule, rank) for rank in ranks), strict=True)]
    rounds = max(1, schedule.ranks - 1)
    hop_s = traffic(schedule.keys_and_values).time_s(block_bytes, link) / rounds
    waits = [max(pair_s * pairs, hop_s) for pairs in busiest[:-1]]
    return float(sum(waits) + pair_s * busiest[-1])


def prove(schedule: RingAttention) -> None:
    """Raise `CheckFailed` unless every query meets every key once, where that key is then."""
    prove_collective(schedule.keys_and_values)
    prove_collective(schedule.gradients)
    met: Counter[tuple[int, int]] = Counter()
    for rank in range(schedule.ranks):
        held = [rank, *(hop.received for hop in schedule.hops(rank, schedule.keys_and_values))]
        for round_, owner in enumerate(held):
            if owner != (rank - round_) % schedule.ranks:
                raise CheckFailed(f"rank {rank} has the block of rank {owner} in round {round_}")
            met.update((pair.query, pair.key) for pair in schedule.pairs(rank, owner))
        added = [hop.sent for hop in schedule.hops(rank, schedule.gradients)]
        if added != held[1:]:
            raise CheckFailed(f"rank {rank} sends gradients of {added} and computes {held[1:]}")
    chunks = range(2 * schedule.ranks)
    for query, key in product(chunks, chunks):
        wanted = int(query >= key or not schedule.causal)
        if met[query, key] != wanted:
            raise CheckFailed(
                f"queries of chunk {query} meet keys of chunk {key} {met[query, key]} times, "
                f"not {wanted}"
            )
