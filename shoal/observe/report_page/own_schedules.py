"""What a strategy takes from files of the user, in the record of a run: as data.

Who opens a page of a record opens no file that the record names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.schedules.collectives import Transfer
from shoal.schedules.collectives import catalog as collectives
from shoal.schedules.mixing import mixing_for
from shoal.schedules.pipelines import Action
from shoal.schedules.pipelines import catalog as pipelines
from shoal.strategy.strategy import Strategy

MOST_RANKS = 64
MOST_ACTIONS = 20_000


@dataclass(frozen=True)
class OwnSchedules:
    """Empty where the strategy names no file."""

    collective: tuple[tuple[Transfer, ...], ...] = ()  # of each round
    pipeline: tuple[tuple[Action, ...], ...] = ()  # of each stage
    mixing: tuple[tuple[tuple[float, ...], ...], ...] = ()  # the weights of each step


def recorded_schedules(
    strategy: Strategy, workers: int, reports: Sequence[dict[str, Any] | None]
) -> Any:
    """JSON-able, for the record of a run with these reports of its ranks."""
    sync = strategy.sync_for(workers)
    plain = strategy.without_files()
    replicas = strategy.division(workers).replicas
    found: dict[str, Any] = {}
    if sync != plain.sync_for(workers) and 1 < replicas <= MOST_RANKS:
        if sync.mixing_graph is not None:
            found["mixing"] = [
                one.tolist() for one in mixing_for(sync.mixing_graph, replicas).matrices
            ]
        elif sync.collective_algorithm is not None:
            made = collectives.build("all_reduce", sync.collective_algorithm, replicas)
            found["collective"] = [list(transfers) for transfers in made.rounds]
    counts = [one["microbatches"] for one in reports if one and one.get("microbatches")]
    pp = strategy.pp
    if pp is not None and pp != plain.pp and counts:
        found["pipeline"] = pipelines.build(pp.schedule, pp.size, max(counts), pp.chunks).actions
    return msgspec.to_builtins(found)
