"""Simulates training steps on a cluster: computation, messages that share links, waits.

    main   [ forward ][ backward        ]·····wait·····[ update ]
    comm         ···········[ reduce ][ reduce ][ reduce ]

Each rank does the actions of its pipeline stage in order; gradients are sent bucket by bucket while
the last backward goes on. Stragglers and noise make ranks unequal. The spans are those of a real
run's trace, so `shoal.observe` draws and sums them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.errors import BadInput
from shoal.observe.trace import STEP, WAIT, Span
from shoal.plan.simulator.flows import Longs
from shoal.plan.simulator.messages import Routes, Wires
from shoal.plan.simulator.step_tasks import StepTasks, StepWork, Unevenness
from shoal.plan.simulator.task_graph import TaskTimes
from shoal.plan.sync_price.base import Agreeing


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
    spans_by_rank: dict[int, list[Span]] = field(repr=False)


def simulate_step(
    work: StepWork,
    agreeing: Agreeing,
    ranks: Longs,
    wires: Wires | Routes,
    uneven: Unevenness | None = None,
    steps: int = 1,
) -> StepRun:
    """Simulate steps of all replicas; `ranks` are by replica, stage and place (`rank_grid`)."""
    if ranks.ndim != 3 or ranks.shape[1] != work.stages:
        raise BadInput(f"{work.stages} stages do not fit a grid of ranks of shape {ranks.shape}")
    if steps < 1:
        raise BadInput(f"simulate at least one step, not {steps}")
    routes = wires if isinstance(wires, Routes) else Routes(wires)
    builder = StepTasks(work, agreeing, ranks, uneven or Unevenness())
    for step in range(steps):
        builder.add_step(step)
    devices = 1 + max(int(ranks.max()), *(agreeing.servers or (0,)))
    times = builder.graph.run(routes, devices)
    return _result(builder, times, steps)


def _result(builder: StepTasks, times: TaskTimes, steps: int) -> StepRun:
    ends = [
        tuple(times.end_s[task] for _, task in sorted(by_rank.items())) for by_rank in builder.ends
    ]
    paces = [steps / end_s if end_s else math.inf for end_s in ends[-1]]
    step_s = len(paces) / sum(paces)
    return StepRun(
        times.seconds,
        steps,
        step_s,
        tuple(ends),
        tuple(times.link_bytes),
        _spans(builder, times),
    )


def _spans(builder: StepTasks, times: TaskTimes) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {rank: [] for rank in sorted(builder.ends[0])}
    for number, task in enumerate(builder.graph.tasks):
        if task.kind and task.rank in spans and times.end_s[number] > times.start_s[number]:
            spans[task.rank].append(
                _span(
                    task.kind, times.start_s[number], times.end_s[number], task.track, task.detail
                )
            )
    for rank in spans:
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
