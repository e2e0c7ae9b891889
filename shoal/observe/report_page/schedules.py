"""The schedule of a run's collective, pipeline, gossip or servers, round by round, animated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal.observe.report_page.own_schedules import MOST_ACTIONS, MOST_RANKS
from shoal.observe.report_page.record import RecordedRun
from shoal.plan.timeline import KINDS, simulate
from shoal.runtime.wording import counted
from shoal.schedules.collectives import catalog as collectives
from shoal.schedules.mixing import Mixing, mixing_for
from shoal.schedules.pipelines import Pipeline
from shoal.schedules.pipelines import catalog as pipelines
from shoal.strategy.base import SyncTerm

_MOST_ROUNDS = 60


def animations(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Those that the strategy has; a schedule too large to be followed is left out."""
    if run.strategy.pp is not None:
        yield from _pipeline(run)
    sync = run.strategy.sync_for(run.workers)
    replicas = run.replicas
    servers = max((len(known) for _, known in run.syncs("servers")), default=0)  # or shards
    if servers and replicas + servers * sync.server_replicas <= MOST_RANKS:
        yield _servers(replicas, servers, sync.server_replicas)
    elif sync.mixing_graph and 1 < replicas <= MOST_RANKS:
        yield from _gossip(run, sync, replicas)
    elif not sync.has_servers and 1 < replicas <= MOST_RANKS and sync.lockstep:
        yield from _collective(run, sync.collective_algorithm, replicas)


def _pipeline(run: RecordedRun) -> Iterator[dict[str, Any]]:
    term = run.strategy.pp
    named = run.named.pp
    counts = [rank["microbatches"] for rank in run.ranks if rank.get("microbatches")]
    if term is None or named is None or not counts:
        return
    actions = run.own.pipeline
    chunks = 1 + max((one.chunk for row in actions for one in row), default=(term.chunks or 1) - 1)
    if term.size > MOST_RANKS or max(counts) * term.size * chunks > MOST_ACTIONS // 2:
        return
    if actions:
        timeline = simulate(Pipeline(named.schedule, max(counts), chunks, actions))
    elif term == named:
        timeline = simulate(pipelines.build(term.schedule, term.size, max(counts), term.chunks))
    else:
        return
    hues = [[(str(s.action), KINDS[s.action.kind][2], s.start, s.end) for s in row]
            for row in timeline.spans]  # fmt: skip
    yield {
        "type": "pipeline",
        "title": str(timeline.pipeline),
        "note": f"As scheduled, with a backward twice as long as a forward: bubble "
        f"{timeline.bubble:.1%} of the longest stage. F3 is the forward of micro-batch 3, B its "
        "backward, I and W its halves.",
        "rows": hues,
        "end": timeline.makespan,
    }


def _collective(run: RecordedRun, name: str | None, ranks: int) -> Iterator[dict[str, Any]]:
    own = run.own.collective
    recorded_name = run.named.sync_for(ranks).collective_algorithm
    if not own and name != recorded_name:
        return
    schedule = own or collectives.build("all_reduce", name or "ring", ranks).rounds
    name = recorded_name
    rounds = [
        [(one.src, one.dst, f"{'+' if one.reduce else '='}{one.chunk}") for one in transfers]
        for transfers in schedule
    ]
    chosen = "" if name else " The strategy names none: the ring stands for what was taken."
    yield {
        "type": "rounds",
        "title": f"all-reduce {name or 'ring'} over {ranks} replicas",
        "note": f"An arrow is a chunk on its way: +2 adds chunk 2 at the receiver, =2 replaces "
        f"it.{chosen}",
        "names": [str(rank) for rank in range(ranks)],
        "rounds": rounds,
    }


def _gossip(run: RecordedRun, term: SyncTerm, ranks: int) -> Iterator[dict[str, Any]]:
    """Until replicas are a tenth as far apart; `levels` is what each has of rank 0's weights."""
    named = run.named.sync_for(ranks).mixing_graph
    if run.own.mixing:
        matrices = tuple(np.array(one).reshape(ranks, ranks) for one in run.own.mixing)
        mixing = Mixing(f"the graph {named}", matrices)
    elif named == term.mixing_graph:
        mixing = mixing_for(named or "", ranks)
    else:
        return
    of_first = np.eye(ranks)[0]
    rounds: list[list[tuple[int, int, str]]] = []
    levels: list[list[float]] = []
    told: list[str] = []
    for step in range(min(_MOST_ROUNDS, max(len(mixing.matrices), mixing.steps_to_tenth))):
        heard = [(rank, mixing.heard_by(rank, step)) for rank in range(ranks)]
        found = [(peer, rank, share) for rank, of in heard for peer, share in of.items()]
        rounds.append([(a, b, f"{share:.2g}") for a, b, share in found if a != b])
        of_first = mixing.at(step) @ of_first
        levels.append([round(float(level), 4) for level in of_first])
        taken = {words for _, _, words in rounds[-1]}
        each = f"each takes {taken.pop()} of its neighbours, " if len(taken) == 1 else ""
        told.append(f"{each}{min(levels[-1]):.1%} to {max(levels[-1]):.1%} is rank 0's")
    when = "whenever it is ready" if term.shares_memory else "each step"
    yield {
        "type": "rounds",
        "title": f"mixing over {mixing.name}",
        "note": f"An arrow is a replica's weights on their way, with the share that the receiver "
        f"takes of them, {when}. The fuller a circle, the more it has of the weights that rank 0 "
        f"began with; all come to {1 / ranks:.1%}. {mixing.expectation.capitalize()}.",
        "names": [str(rank) for rank in range(ranks)],
        "rounds": rounds,
        "levels": levels,
        "told": told,
    }


def _servers(replicas: int, shards: int, copies: int) -> dict[str, Any]:
    """Pushes go to the first copy of a shard, and on along its chain; every copy serves pulls."""
    heads = range(replicas, replicas + shards * copies, copies)
    pushes = [(worker, head, "push") for worker in range(replicas) for head in heads]
    pulls = [(head + worker % copies, worker, "pull") for worker, head, _ in pushes]
    links = range(copies - 1)
    chain = [[(head + copy, head + copy + 1, "copy") for head in heads] for copy in links]
    servers = [f"S{shard}" for shard in range(shards)]
    if copies > 1:
        servers = [f"{name}.{copy}" for name in servers for copy in range(copies)]
    copied = f" in {copies} copies (S0.1 is copy 1 of shard 0)" if copies > 1 else ""
    return {
        "type": "rounds",
        "title": f"push and pull of {counted(replicas, 'worker')} and {counted(shards, 'server')}",
        "note": "Gradients are pushed to the servers, each of which holds a part of the weights"
        f"{copied}; then weights are pulled.",
        "names": [*map(str, range(replicas)), *servers],
        "rounds": [pushes, *chain, pulls],
    }
