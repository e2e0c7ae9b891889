"""The counters of the servers, in sentences for the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.runtime.wording import counted
from shoal.server.consistency import Rule
from shoal.sync.ps.shard_counts import counts_of_shards


def summarize(
    stats: Sequence[dict[str, Any]],
    rule: Rule,
    memory: str | None = None,
    counted: str = "worker",
    holder: str = "server",
) -> list[str]:
    """`stats` has one entry per shard, the leader's first.

    `memory` is where gradients and weights are exchanged, if not over connections; `counted` is
    what pushes are of; `holder` is "shard" where several servers hold each.
    """
    if not stats:
        return []
    leader = stats[0]
    sentences = []
    if not rule.is_synchronous and "workers" in leader:
        sentences += [
            f"{counted} {worker}: {_pushes_of(leader, worker, rule)}"
            for worker in leader["workers"]
        ]
        missed = ", ".join(f"{k}: {v}" for k, v in leader["missed_updates"].items())
        if missed:
            sentences.append(f"updates between a pull and its push, and how often: {missed}")
    lost = sum(server.get("lost_pushes", 0) for server in stats)
    if lost:
        sentences.append(
            f"pushes that were acknowledged and lost with a server (eventual consistency): {lost}"
        )
    shards = counts_of_shards(stats)
    for index, counts in enumerate(shards):
        sentences.append(f"{holder} {index}: {_traffic(counts, memory)}")
    if not all(counts["is_complete"] for counts in shards):
        sentences.append("at least: what a server had counted before it was lost is not included")
    return sentences


def _traffic(counts: dict[str, Any], memory: str | None) -> str:
    transport = "" if memory is None else f" by sockets; gradients and weights by {memory}"
    at_least = "" if counts["is_complete"] else "at least "
    return (
        f"{counts['updates']} updates, {at_least}{counts['requests']} requests, "
        f"{counts['received_bytes'] / 1e6:.1f} MB in, {counts['sent_bytes'] / 1e6:.1f} MB out"
        + transport
    )


def _pushes_of(leader: dict[str, Any], worker: str, rule: Rule) -> str:
    counts = leader["workers"][worker]
    phrases = [f"{counts['admitted']} pushes counted"]
    if rule.quorum is not None:
        phrases.append(f"{counts['folded']} folded into a later step")
        phrases.append(f"{counts['dropped']} dropped as late")
    if leader["left_out"][worker]:
        phrases.append(f"{counted(leader['left_out'][worker], 'step')} left out")
    return ", ".join(phrases)
