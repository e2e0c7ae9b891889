"""Simulates steps of a strategy: the work of each stage from the workload, and its cluster's links.

The steady state of a pipeline is not simulated at length: of more micro-batches than
`MOST_MICROBATCHES` for each stage, the rest is added with the time that the slowest stage needs.

    main   [ forward ][ backward        ]·····wait·····[ update ]
    comm         ···········[ reduce ][ reduce ][ reduce ]

Each rank does the actions of its pipeline stage in order; gradients are sent bucket by bucket while
the last backward goes on. Stragglers and noise make ranks unequal. The spans are those of a real
run's trace, so `shoal.observe` draws and sums them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from shoal.cluster import Cluster, Noise
from shoal.errors import BadInput
from shoal.plan.predict import (
    PlanSettings,
    Predictor,
    ResolvedStep,
    batches_in_turns,
    price_of,
    resolve_step,
)
from shoal.plan.simulator.messages import Floats, Longs, MessageNetwork, Routes
from shoal.plan.simulator.step_tasks import (
    MOST_BUCKETS,
    StepTasks,
    StepWork,
    Unevenness,
    rank_grid,
)
from shoal.plan.simulator.symmetry import Symmetry
from shoal.plan.simulator.task_graph import TaskTimes
from shoal.plan.step.collective_time import takes_trees
from shoal.plan.step.step_price import ReplicaPricer, weights_of
from shoal.plan.sync_price import Agreeing, SyncQuestion
from shoal.plan.sync_price.ps_links import Serving
from shoal.plan.workloads import Workload
from shoal.runtime.trace import STEP, WAIT, Span, Trace
from shoal.strategy.strategy import Strategy, as_strategy


@dataclass(frozen=True)
class StepRun:
    """Simulated steps. In `step_s` all ranks together do one step's work.

    Where ranks wait for each other it is a step's time; else the harmonic mean of theirs.
    """

    seconds: float
    steps: int
    step_s: float
    rank_end_s: tuple[tuple[float, ...], ...]  # by step and rank in `like`
    like: Mapping[int, int]  # the ranks that were simulated: for how many each stands
    link_bytes: Floats = field(repr=False, compare=False)
    spans_by_rank: Trace = field(repr=False)
    flows: int = 0  # classes of them
    events: int = 0
    is_bound: bool = False  # what links and servers carry at most, not followed step by step


def simulate_step(
    work: StepWork,
    agreeing: Agreeing,
    ranks: Longs,
    routes: Routes,
    uneven: Unevenness | None = None,
    steps: int = 1,
    by_symmetry: bool | None = None,
) -> StepRun:
    """Simulate steps of all replicas; `ranks` are by replica, stage and place (`rank_grid`).

    What is alike is simulated once, `by_symmetry` or where ranks are many.
    """
    uneven = uneven or Unevenness()
    is_wanted = ranks.size > MOST_APART if by_symmetry is None else by_symmetry
    serves = agreeing.way == "servers"
    is_on = is_wanted and uneven.noise == Noise() and not (serves and ranks[0].size > 1)
    if not is_on and ranks.size > MOST_UNLIKE:
        raise BadInput(
            f"{ranks.size} workers that are not alike are too many to simulate: without noise, and "
            f"without tp or pp beside servers, they may be more than {MOST_UNLIKE}"
        )
    if is_on and serves and (agreeing.is_async or agreeing.staleness is not None):
        return _throughput(work, agreeing, ranks, routes, uneven)
    alike = Symmetry(routes, is_on)
    is_stable = False
    while not is_stable:
        builder = StepTasks(work, agreeing, ranks, uneven, alike)
        for step in range(steps):
            builder.add_step(step)
        is_stable = alike.is_stable()
    network, ways = MessageNetwork(alike.capacities()), alike.ways()
    times = builder.graph.run(network, ways)
    shown = builder.ranks
    like = dict(zip(shown.firsts.tolist(), shown.sizes.tolist(), strict=True))
    ends = [tuple(times.end_s[step.end_of(rank)] for rank in like) for step in builder.steps]
    pace = sum(
        n * steps / end_s if end_s else math.inf
        for n, end_s in zip(like.values(), ends[-1], strict=True)
    )
    link_bytes = alike.link_bytes(network.carried_bytes)
    spans = _spans(builder, times, like)
    step_s = ranks.size / pace
    counts = (len(ways.alphas_s), times.events)
    return StepRun(times.seconds, steps, step_s, tuple(ends), like, link_bytes, spans, *counts)


def _throughput(
    work: StepWork, agreeing: Agreeing, ranks: Longs, routes: Routes, uneven: Unevenness
) -> StepRun:
    """Of workers that do not wait for each other: their own paces, up to what all carry at most."""
    in_step = replace(agreeing, is_async=False, staleness=None)
    run = simulate_step(work, in_step, ranks, routes, uneven, 1, True)
    own_s: dict[float, float] = {}  # by times slower
    for rank in run.like:
        if (times := uneven.slow.get(rank, 1.0)) not in own_s:
            [replica, *_] = np.argwhere(ranks == rank)[0]
            alone = simulate_step(work, agreeing, ranks[[replica]], routes, uneven, 1, False)
            own_s[times] = alone.step_s
    paces = sum(n / own_s[uneven.slow.get(rank, 1.0)] for rank, n in run.like.items())
    pace_s = ranks.size / paces if agreeing.staleness is None else max(own_s.values())
    links_s = float((run.link_bytes / routes.links).max(initial=0.0))
    step_s = max(pace_s, links_s, ranks.size * agreeing.apply_s)
    return replace(run, step_s=step_s, is_bound=True)


def _spans(builder: StepTasks, times: TaskTimes, shown: Collection[int]) -> Trace:
    spans: Trace = {rank: [] for rank in shown}
    for task, start_s, end_s in zip(builder.graph.tasks, times.start_s, times.end_s, strict=True):
        if task.kind and task.rank in spans and end_s > start_s:
            spans[task.rank].append(_span(task.kind, start_s, end_s, task.track, task.detail))
    for rank in shown:
        began_s = 0.0
        for number, step in enumerate(builder.steps):
            ended_s = times.end_s[step.end_of(rank)]
            spans[rank].append(_span(STEP, began_s, ended_s, "steps", f"step {number}"))
            spans[rank] += _waits(step.mains_of(rank), times, began_s, ended_s)
            began_s = ended_s
    return spans


def _waits(tasks: list[int], times: TaskTimes, began_s: float, ended_s: float) -> list[Span]:
    """What the thread that computes does not fill: it waits for messages."""
    found = []
    at_s = began_s
    for number in tasks:
        if times.start_s[number] > at_s + 1e-9 * math.fabs(at_s):
            found.append(_span(WAIT, at_s, times.start_s[number], "main", ""))
        at_s = max(at_s, times.end_s[number])
    if ended_s > at_s:
        found.append(_span(WAIT, at_s, ended_s, "main", ""))
    return [span for span in found if span.end_ns > span.start_ns]


def _span(kind: str, start_s: float, end_s: float, track: str, detail: str) -> Span:
    return Span(kind, round(start_s * 1e9), round(end_s * 1e9), track, detail)


MOST_UNLIKE = 20_000  # ranks that are simulated one by one
MOST_APART = 64  # ranks of which each is simulated, alike or not
MOST_MICROBATCHES = 3  # of each stage
_SOME_STEPS = 8  # of strategies whose workers do not wait for each other


class BusyLink(NamedTuple):
    name: str
    bytes_per_s: float
    carried_bytes: float


@dataclass(frozen=True)
class SimulatedStep:
    """`step_s` as a prediction has it: the time in which all workers do one global batch."""

    step_s: float
    run: StepRun
    left_out: int = 0  # micro-batches that were added and not simulated
    busiest_link: BusyLink | None = None


def simulate_strategy(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy | str,
    workers: int,
    settings: PlanSettings,
    uneven: Unevenness | None = None,
    steps: int | None = None,
    lost: Collection[int] = (),
    by_symmetry: bool | None = None,
) -> SimulatedStep:
    """Simulate a strategy; without `uneven` all workers are equally fast.

    Replicas of `lost` workers are missing, and the others do the whole batch.
    """
    value = as_strategy(strategy)
    size = cluster.of_size(workers)
    predictor = Predictor(workload, size)
    pricer = predictor.pricer(workers, settings.program)
    ranks = rank_grid(value.layout(workers), pricer.order)
    ranks = ranks[~np.isin(ranks, list(lost)).any(axis=(1, 2))]
    if not ranks.size:
        raise BadInput("no replica is left of those that lost workers belong to")
    _check_stages(ranks, uneven := uneven or Unevenness(), value)
    resolved = resolve_step(workload, value, ranks.size, settings)
    term: Any = value.sync_for(resolved.layout.replicas)
    question = predictor.question(pricer, resolved, pricer.price(*resolved), settings)
    if getattr(term, "overlap", False):
        raise BadInput(
            f"averages of {term} are under way for several steps, which is not simulated: leave "
            "out --simulate, or `shoal rehearse` it"
        )
    agreeing = price_of(term, question).agreeing
    if agreeing.way == "servers":
        serving = Serving(term, question)
        # workers that do not wait also take turns at the memory of the servers' host
        apply_s = serving.update_s() + (0.0 if term.lockstep else serving.memory_s())
        agreeing = replace(agreeing, servers=_hosts(term, size, workers, ranks), apply_s=apply_s)
        size = size.of_size(1 + max(agreeing.servers))
    inside = 1 if agreeing.algorithm == "ring" else size.node.devices
    is_overlapped = settings.overlap and question.idle_share > 0
    agreeing = replace(agreeing, is_overlapped=is_overlapped, node_devices=inside)
    compression = 1.0  # what is sent of the gradients' bytes
    if getattr(term, "compress", None) is not None:
        plain = price_of(replace(term, compress=None), question).sent_bytes
        compression = price_of(term, question).sent_bytes / plain if plain else 1.0
    work = work_of(pricer, resolved, question, agreeing.way, compression)
    summed = work.parameter_bytes if agreeing.way == "average" else work.gradient_bytes
    piece = max(summed) / max(1, min(agreeing.buckets, MOST_BUCKETS))
    if agreeing.algorithm == "auto" and takes_trees(pricer.cluster, question.group, piece):
        agreeing = replace(agreeing, algorithm="trees")
    kept = min(work.microbatches, MOST_MICROBATCHES * work.stages)
    if uneven.slow:  # what is added has the pace of equal workers
        kept = work.microbatches
    waits = not agreeing.is_async and agreeing.staleness is None and agreeing.quorum is None
    routes = Routes(size)
    number = steps or (agreeing.every if waits else _SOME_STEPS)
    some = replace(work, microbatches=kept)
    run = simulate_step(some, agreeing, ranks, routes, uneven, number, by_symmetry)
    slowest_s = max(map(sum, zip(work.forward_s, work.backward_s, strict=True)))
    left_out = work.microbatches - kept
    step_s = (run.step_s + left_out * slowest_s) / batches_in_turns(resolved.layout, term)
    return SimulatedStep(step_s, run, left_out, _busiest(routes, run))


def _check_stages(ranks: Longs, uneven: Unevenness, strategy: Strategy) -> None:
    """Workers of a stage (tp, cp, ep) wait for each other in every layer: equal ones are one."""
    factors = np.ones(int(ranks.max()) + 1)
    slow = [rank for rank in uneven.slow if rank < factors.size]
    factors[slow] = [uneven.slow[rank] for rank in slow]
    of_stage = factors[ranks]
    if ranks.shape[2] > 1 and (uneven.noise != Noise() or np.ptp(of_stage, axis=2).any()):
        raise BadInput(
            f"workers of {strategy} wait for each other in every layer, which is not simulated "
            "where some of them are slower: shoal predict --slow and shoal rehearse --slow have it"
        )


def _busiest(routes: Routes, run: StepRun) -> BusyLink | None:
    """The link that would take longest for what it carried."""
    if not run.link_bytes.any():
        return None
    link = int(np.argmax(run.link_bytes / routes.links))
    return BusyLink(routes.name(link), float(routes.links[link]), float(run.link_bytes[link]))


def work_of(
    pricer: ReplicaPricer,
    resolved: ResolvedStep,
    question: SyncQuestion,
    way: str,
    compression: float = 1.0,
    has_messages: bool = True,
) -> StepWork:
    """As the step is priced; without what ranks of a replica send each other, if so wanted."""
    table, stages = pricer.dealt(resolved.layout, resolved.split, resolved.shape)
    precision = pricer.workload.precision
    held = weights_of(stages, table.parameters)
    share = 1 / question.replicas if way == "zero" else 1.0
    # of the messages inside a layer each trip takes an equal part
    repeats = 3 if resolved.split.recompute == "full" else 2
    times = table.times
    if not has_messages:
        alone_s = [t.forward.seconds + t.backward.seconds + t.recompute.seconds for t in times]
        times = tuple(
            t._replace(seconds=alone, messages=()) for t, alone in zip(times, alone_s, strict=True)
        )
    forward_s = [t.forward.seconds + sum(m.seconds for m in t.messages) / repeats for t in times]
    backward_s = [t.seconds - f for t, f in zip(times, forward_s, strict=True)]
    # a blocking send of every chunk there, and one back
    waits = has_messages and len(stages) > 1 and not resolved.shape.hides_sends
    wait_s = resolved.shape.chunks * pricer.cluster.device.wait_s if waits else 0.0
    return StepWork(
        tuple(wait_s + seconds for seconds in weights_of(stages, forward_s)),
        tuple(wait_s + seconds for seconds in weights_of(stages, backward_s)),
        tuple(weights_of(stages, [time.weight_s for time in table.times])),
        resolved.microbatches,
        resolved.shape.schedule,
        resolved.shape.chunks if resolved.shape.chunks > 1 else None,
        max(table.output_bytes[:-1] or table.output_bytes),
        tuple(parameters * precision.gradient_bytes * compression for parameters in held),
        tuple(float(parameters * precision.parameter_bytes) for parameters in held),
        question.update_part(share).seconds + resolved.fixed_s(pricer.cluster.device),
    )


def _hosts(term: Any, cluster: Cluster, workers: int, ranks: Longs) -> tuple[int, ...]:
    """Where servers run: on workers, or on nodes of their own behind the workers'."""
    there = np.sort(ranks.ravel()).tolist()
    if term.placement != "servers":
        return tuple(there if term.placement == "workers" else there[:1])
    devices = cluster.node.devices
    if workers <= devices:
        return tuple(there[server % len(there)] for server in range(term.servers))
    nodes = -(-workers // devices)
    nics = min(cluster.node.nics, devices)
    firsts = [(nodes + server) * devices for server in range(term.servers)]
    return tuple(first + nic * devices // nics for first in firsts for nic in range(nics))
