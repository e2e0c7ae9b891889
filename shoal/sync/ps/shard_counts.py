"""Counters of each shard: those of its replicas, added up.

A replica that is lost takes with it how many requests it has answered. What follows from the log
(updates, pushes, how many updates each one missed) is known to all replicas, and complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_SUMS = ("sent_again", "requests", "received_bytes", "sent_bytes", "cpu_s")
_HISTOGRAMS = ("steps_ahead", "refused")
_OF_ROWS = ("tables", "replicas")


def counts_of_shards(stats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Without counters of rows. `stats` has the head of each shard, with its other replicas."""
    return [_of_shard(head, [head, *head.get("replicas", [])]) for head in stats]


def _of_shard(head: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {key: value for key, value in head.items() if key not in _OF_ROWS}
    counts |= {key: sum(each[key] for each in replicas) for key in _SUMS if key in head}
    counts |= {key: _added([each[key] for each in replicas]) for key in _HISTOGRAMS if key in head}
    return counts | {"is_complete": is_complete(head)}


def _added(histograms: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in histograms:
        total.update(each)
    return {key: total[key] for key in sorted(total, key=lambda key: (len(key), key))}


def is_complete(head: Mapping[str, Any]) -> bool:
    """Whether no replica of the shard was lost or removed."""
    return all(each.get("is_complete", True) for each in (head, *head.get("replicas", [])))
