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
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.cluster import Cluster
from shoal.cluster.topology import ClusterTopology
from shoal.errors import BadInput
from shoal.plan.predict import (
    PlanSettings,
    Predictor,
    ResolvedStep,
    batches_in_turns,
    price_of,
    resolve_step,
)
from shoal.plan.simulator.messages import Longs, Routes
from shoal.plan.simulator.step_tasks import StepTasks, StepWork, Unevenness, rank_grid
from shoal.plan.simulator.task_graph import TaskTimes
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
    rank_end_s: tuple[tuple[float, ...], ...]  # by step and rank
    link_bytes: tuple[float, ...] = field(repr=False)
    spans_by_rank: Trace = field(repr=False)


def simulate_step(
    work: StepWork,
    agreeing: Agreeing,
    ranks: Longs,
    routes: Routes,
    uneven: Unevenness | None = None,
    steps: int = 1,
) -> StepRun:
    """Simulate steps of all replicas; `ranks` are by replica, stage and place (`rank_grid`)."""
    builder = StepTasks(work, agreeing, ranks, uneven or Unevenness())
    for step in range(steps):
        builder.add_step(step)
    devices = 1 + max(int(ranks.max()), *(agreeing.servers or (0,)))
    times = builder.graph.run(routes, devices)
    ends = [tuple(times.end_s[last[rank]] for rank in sorted(last)) for last in builder.ends]
    paces = [steps / end_s if end_s else math.inf for end_s in ends[-1]]
    step_s = len(paces) / sum(paces)
    spans = _spans(builder, times)
    return StepRun(times.seconds, steps, step_s, tuple(ends), tuple(times.link_bytes), spans)


def _spans(builder: StepTasks, times: TaskTimes) -> Trace:
    spans: Trace = {rank: [] for rank in sorted(builder.ends[0])}
    for task, start_s, end_s in zip(builder.graph.tasks, times.start_s, times.end_s, strict=True):
        if task.kind and task.rank in spans and end_s > start_s:
            spans[task.rank].append(_span(task.kind, start_s, end_s, task.track, task.detail))
    for rank in builder.ends[0]:
        began_s = 0.0
        for step, by_rank in enumerate(builder.ends):
            ended_s = times.end_s[by_rank[rank]]
            spans[rank].append(_span(STEP, began_s, ended_s, "steps", f"step {step}"))
            spans[rank] += _waits(builder.mains[step][rank], times, began_s, ended_s)
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
) -> SimulatedStep:
    """Simulate a strategy; without `uneven` all workers are equally fast."""
    value = as_strategy(strategy)
    predictor = Predictor(workload, cluster.of_size(workers))
    pricer = predictor.pricer(workers)
    resolved = resolve_step(workload, value, workers, settings)
    term: Any = value.sync_for(resolved.layout.replicas)
    question = predictor.question(pricer, resolved, pricer.price(*resolved), settings)
    size = cluster.of_size(workers)
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
        agreeing = replace(agreeing, servers=_hosts(term, question), apply_s=apply_s)
        size = size.of_size(1 + max(agreeing.servers))
    inside = 1 if agreeing.algorithm == "ring" else size.node.devices
    is_overlapped = settings.overlap and question.idle_share > 0
    agreeing = replace(agreeing, is_overlapped=is_overlapped, node_devices=inside)
    compression = 1.0  # what is sent of the gradients' bytes
    if getattr(term, "compress", None) is not None:
        plain = price_of(replace(term, compress=None), question).sent_bytes
        compression = price_of(term, question).sent_bytes / plain if plain else 1.0
    work = _work(pricer, resolved, question, agreeing, compression)
    kept = min(work.microbatches, MOST_MICROBATCHES * work.stages)
    waits = not agreeing.is_async and agreeing.staleness is None and agreeing.quorum is None
    topology = ClusterTopology(size)
    run = simulate_step(
        replace(work, microbatches=kept),
        agreeing,
        rank_grid(resolved.layout, pricer.order),
        Routes(topology),
        uneven,
        steps or (agreeing.every if waits else _SOME_STEPS),
    )
    slowest_s = max(map(sum, zip(work.forward_s, work.backward_s, strict=True)))
    left_out = work.microbatches - kept
    step_s = (run.step_s + left_out * slowest_s) / batches_in_turns(resolved.layout, term)
    return SimulatedStep(step_s, run, left_out, _busiest(topology, run))


def _busiest(topology: ClusterTopology, run: StepRun) -> BusyLink | None:
    """The link that would take longest for what it carried."""
    links = [
        BusyLink(link.name, link.bytes_per_s, num_bytes)
        for link, num_bytes in zip(topology.links, run.link_bytes, strict=True)
        if num_bytes > 0
    ]
    return max(links, key=lambda link: link.carried_bytes / link.bytes_per_s, default=None)


def _work(
    pricer: ReplicaPricer,
    resolved: ResolvedStep,
    question: SyncQuestion,
    agreeing: Agreeing,
    compression: float,
) -> StepWork:
    table, stages = pricer.dealt(resolved.layout, resolved.split, resolved.shape)
    precision = pricer.workload.precision
    held = weights_of(stages, table.parameters)
    share = 1 / question.replicas if agreeing.way == "zero" else 1.0
    # of the messages inside a layer each trip takes an equal part
    repeats = 3 if resolved.split.recompute == "full" else 2
    forward_s = [
        t.forward.seconds + sum(m.seconds for m in t.messages) / repeats for t in table.times
    ]
    backward_s = [t.seconds - f for t, f in zip(table.times, forward_s, strict=True)]
    # a blocking send of every chunk there, and one back
    waits = len(stages) > 1 and not resolved.shape.hides_sends
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


def _hosts(term: Any, question: SyncQuestion) -> tuple[int, ...]:
    """Where servers run: on workers, or on nodes of their own behind the workers'."""
    if term.placement == "rank0":
        return (0,)
    if term.placement == "workers":
        return tuple(range(question.workers))
    devices = question.cluster.node.devices
    if question.workers <= devices:
        return tuple(server % question.workers for server in range(term.servers))
    nodes = -(-question.workers // devices)
    nics = min(question.cluster.node.nics, devices)
    firsts = [(nodes + server) * devices for server in range(term.servers)]
    return tuple(first + nic * devices // nics for first in firsts for nic in range(nics))
