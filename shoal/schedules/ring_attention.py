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

from dataclasses import dataclass
from typing import NamedTuple

from shoal.schedules.collectives import Collective
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
