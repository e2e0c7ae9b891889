"""The schedule of a run's collective, pipeline or servers, round by round, to be animated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.errors import ShoalError
from shoal.plan.timeline import KINDS, simulate
from shoal.report_page.record import RecordedRun
from shoal.runtime.wording import counted
from shoal.schedules.collectives import catalog as collectives
from shoal.schedules.pipelines import catalog as pipelines

_MOST_RANKS = 64
_MOST_ACTIONS = 20_000


def animations(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Those that the strategy has; a schedule too large to be followed is left out."""
    if run.strategy.pp is not None:
        yield from _pipeline(run)
    sync = run.strategy.sync_for(run.workers)
    replicas = run.strategy.layout(run.workers).replicas
    servers = max((len(known) for _, known in run.syncs("servers")), default=0)  # or shards
    if servers and replicas + servers <= _MOST_RANKS:
        yield _servers(replicas, servers)
    elif not sync.has_servers and 1 < replicas <= _MOST_RANKS and sync.lockstep:
        yield from _collective(sync.collective_algorithm, replicas)


def _pipeline(run: RecordedRun) -> Iterator[dict[str, Any]]:
    term = run.strategy.pp
    counts = [rank["microbatches"] for rank in run.ranks if rank.get("microbatches")]
    if term is None or not counts:
        return
    try:
        timeline = simulate(pipelines.build(term.schedule, term.size, max(counts), term.chunks))
    except ShoalError:  # the file of a user's own schedule is not here
        return
    if sum(map(len, timeline.spans)) > _MOST_ACTIONS:
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


def _collective(name: str | None, ranks: int) -> Iterator[dict[str, Any]]:
    try:
        schedule = collectives.build("all_reduce", name or "ring", ranks)
    except ShoalError:
        return
    rounds = [
        [(one.src, one.dst, f"{'+' if one.reduce else '='}{one.chunk}") for one in transfers]
        for transfers in schedule.rounds
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


def _servers(replicas: int, servers: int) -> dict[str, Any]:
    pairs = [(worker, replicas + server) for worker in range(replicas) for server in range(servers)]
    return {
        "type": "rounds",
        "title": f"push and pull of {counted(replicas, 'worker')} and {counted(servers, 'server')}",
        "note": "Gradients are pushed to the servers, each of which holds a part of the weights; "
        "then weights are pulled.",
        "names": [*map(str, range(replicas)), *(f"S{server}" for server in range(servers))],
        "rounds": [[(a, b, "push") for a, b in pairs], [(b, a, "pull") for a, b in pairs]],
    }
