"""The price of a collective: rounds, bytes, time and memory, from its schedule alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.catalog import algorithms, build
from shoal.schedules.collectives.cost import Link, memory_chunks, traffic


@dataclass(frozen=True)
class Price:
    """What one call costs. "Largest" is the rank that has the most, "total" all ranks together.

    `busiest_bytes` is what the busiest port carries: per round the larger of what it sends and
    what it receives. `ratio` is that against the least that any algorithm of the kind needs,
    2(p-1)/p V for an all-reduce; None where the bound is zero. `extra_memory_bytes` is room
    beyond input and output on the worst rank; `redundant_bytes` is what all ranks together hold
    when the collective is done, in place, beyond one copy of the result.
    """

    kind: str
    algorithm: str
    ranks: int
    num_bytes: int
    rounds: int
    time_s: float
    sent_largest_bytes: float
    sent_total_bytes: float
    received_largest_bytes: float
    received_total_bytes: float
    busiest_bytes: float
    bound_bytes: float
    ratio: float | None
    extra_memory_bytes: float
    redundant_bytes: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def price(
    collective: Collective,
    num_bytes: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> Price:
    """Price one call on vectors of `num_bytes`; the time model is that of `cost.Link`.

    `num_bytes` is V, the whole vector of one rank: for gather, scatter, all_gather and
    reduce_scatter all pieces together, for all_to_all the p pieces that a rank sends.
    """
    counted = traffic(collective)
    chunk = collective.chunk_bytes(num_bytes)
    sent = counted.by_rank(counted.sent_chunks)
    received = counted.by_rank(counted.received_chunks)
    bound = collective.pattern.bound(collective.ranks) * num_bytes
    busiest = counted.busiest_chunks * chunk
    return Price(
        kind=collective.kind,
        algorithm=collective.name,
        ranks=collective.ranks,
        num_bytes=num_bytes,
        rounds=counted.rounds,
        time_s=counted.time_s(chunk, Link(alpha_s, beta_s_per_byte, gamma_s_per_byte)),
        sent_largest_bytes=float(sent.max()) * chunk,
        sent_total_bytes=float(sent.sum()) * chunk,
        received_largest_bytes=float(received.max()) * chunk,
        received_total_bytes=float(received.sum()) * chunk,
        busiest_bytes=busiest,
        bound_bytes=bound,
        ratio=busiest / bound if bound else None,
        extra_memory_bytes=memory_chunks(collective, counted) * chunk,
        redundant_bytes=float(collective.pattern.redundant(collective.ranks) * num_bytes),
    )


def price_all(
    kind: str,
    ranks: int,
    num_bytes: int,
    alpha_s: float,
    beta_s_per_byte: float,
    gamma_s_per_byte: float = 0.0,
) -> list[Price]:
    """Every algorithm of a kind, the fastest first."""
    prices = [
        price(build(kind, name, ranks), num_bytes, alpha_s, beta_s_per_byte, gamma_s_per_byte)
        for name in algorithms(kind)
    ]
    return sorted(prices, key=lambda one: one.time_s)
