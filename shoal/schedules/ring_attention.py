"""Ring attention: blocks of keys and values go round a ring, and meet every block of queries.

    zigzag over 2 ranks    chunk     0 1 2 3        rank 0 has chunks 0 and 3, rank 1 has 1 and 2
                           rank      0 1 1 0        so both have as much causal work

    forward     K and V travel as a ring all-gather: p-1 rounds of one block per rank
    backward    K and V travel so again; dK and dV follow one round behind as a ring reduce-scatter,
                which adds what each rank computes and ends at the block's owner

In round k rank r computes with the block of rank r-k, while that block travels on. Per rank, with
K and V of one block of B bytes: forward sends (p-1)·B, backward (p-1)·B and as many numbers of
dK and dV.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from shoal.errors import CheckFailed
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.cost import Link, traffic
from shoal.schedules.collectives.proof import prove as prove_collective
from shoal.schedules.collectives.ring import ring_all_gather, ring_reduce_scatter


class Hop(NamedTuple):
    """What a rank does with its neighbours in a round: one block out, one block in."""

    sent: int
    to: int
    received: int
    source: int


class ChunkPair(NamedTuple):
    """Queries of a chunk meet keys of a chunk; on the `diagonal` some of them are masked."""

    query: int
    key: int
    diagonal: bool


@dataclass(frozen=True)
class RingAttention:
    """The schedule over some ranks; causal attention leaves out keys of later chunks."""

    ranks: int
    causal: bool = True

    @property
    def keys_and_values(self) -> Collective:
        return ring_all_gather(self.ranks)

    @property
    def gradients(self) -> Collective:
        """Of keys and values; its round k follows round k of `keys_and_values`."""
        return ring_reduce_scatter(self.ranks)

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks of the sequence that a rank has: one from each end."""
        return rank, 2 * self.ranks - 1 - rank

    def pairs(self, rank: int, owner: int) -> list[ChunkPair]:
        """What `rank` computes with the keys and values of `owner`."""
        queries = self.chunks(rank)
        keys = self.chunks(owner)
        return [
            ChunkPair(query, key, self.causal and query == key)
            for query in queries
            for key in keys
            if query >= key or not self.causal
        ]

    def hops(self, rank: int, collective: Collective) -> list[Hop]:
        """What a rank sends and receives, round by round."""
        hops = []
        for transfers in collective.rounds:
            out = next(t for t in transfers if t.src == rank)
            into = next(t for t in transfers if t.dst == rank)
            hops.append(Hop(out.chunk, out.dst, into.chunk, into.src))
        return hops

    def work(self, rank: int) -> list[float]:
        """Pairs of chunks that a rank computes in each round; the diagonal counts half."""
        blocks = [(rank - k) % self.ranks for k in range(self.ranks)]
        return [sum(0.5 if p.diagonal else 1.0 for p in self.pairs(rank, b)) for b in blocks]

    def time_s(self, block_bytes: float, pair_s: float, link: Link) -> float:
        """Forward: each round takes the longer of its transfer and its slowest rank's computing."""
        busiest = [max(work) for work in zip(*map(self.work, range(self.ranks)), strict=True)]
        rounds = max(1, self.ranks - 1)
        hop_s = traffic(self.keys_and_values).time_s(block_bytes, link) / rounds
        waits = [max(pair_s * work, hop_s) for work in busiest[:-1]]
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
