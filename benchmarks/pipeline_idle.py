"""How long the stages of a pipeline idle: traced, beside the simulation.

Layers sleep instead of computing, so that few cores can run many stages; each stage is a thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.harness import say
from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.plan.timeline import Times, simulate
from shoal.runtime.trace import Recorder, Span
from shoal.schedules.collectives.cost import Link
from shoal.schedules.pipelines import Pipeline
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Strategy, parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices

SCHEDULES = ("inter-op", "gpipe", "1f1b", "interleaved", "zb-h1")
T = TypeVar("T")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Slow(nn.Module):
    """A layer whose forward, gradient of the input and gradient of the weight take so long each."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.gain = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = _Sleep.apply(self.scale, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        # weights join before the sleep, so that it is on the way to inputs on the first stage, too
        x = x * self.gain + self.shift
        slept: Tensor = _Sleep.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        return slept * scale


def compare(
    schedule: str,
    stages: int = 4,
    microbatches: int = 8,
    action_s: float = 0.08,
    steps: int = 3,
) -> dict[str, Any]:
    """The idle fraction of a step, the median of `steps`, beside the simulated one.

    Each of F, I and W takes `action_s`.
    """
    say(f"tracing {schedule}")
    pipeline = build(schedule, stages, microbatches)

    def train(rank: int, boxes: Mailboxes) -> list[list[Span]]:
        return _traced_steps(rank, boxes, pipeline, action_s, steps)

    spans = _on_threads(stages, train)
    return {
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        "chunks": pipeline.chunks,
        "simulated_idle": simulate(pipeline, Times(action_s, action_s, action_s)).idle,
        "traced_idle": statistics.median(
            idle_fraction(list(step)) for step in zip(*spans, strict=True)
        ),
    }


def _traced_steps(
    rank: int, boxes: Mailboxes, pipeline: Pipeline, action_s: float, steps: int
) -> list[list[Span]]:
    """The spans of each step on one stage."""
    tracer = Recorder(rank, 0)
    group = Group(Scheduled(ThreadTransport(boxes, rank), link=Link()))
    services = RunServices(tracer=tracer)
    job = Job(_strategy(pipeline), group, device=torch.device("cpu"), services=services)
    layers = pipeline.stages * pipeline.chunks
    model = nn.Sequential(*(Slow(action_s / pipeline.chunks) for _ in range(layers)))
    step = job.step(model, nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.0))
    batch = torch.zeros(pipeline.microbatches, 4), torch.zeros(pipeline.microbatches, 4)
    spans = []
    for local_batch in job.batches([batch] * (steps + 1)):
        group.barrier().wait()
        tracer.spans = []
        step(local_batch)
        spans.append(tracer.spans)
    return spans[1:]  # the first step also checks the stages against the model


def _strategy(pipeline: Pipeline) -> Strategy:
    """One layer on each virtual stage."""
    layers = range(1, pipeline.stages * pipeline.chunks)
    cuts = ", ".join(f'"{layer}"' for layer in layers)
    options = f'schedule="{pipeline.name}", microbatches={pipeline.microbatches}'
    return parse(f"pp({pipeline.stages}, {options}, cuts=[{cuts}])")


def idle_fraction(spans: list[list[Span]]) -> float:
    """The fraction of all stages' time in which they do not compute, from first to last."""
    compute = [[s for s in stage if s.kind in ("forward", "backward")] for stage in spans]
    start = min(s.start_ns for stage in compute for s in stage)
    end = max(s.end_ns for stage in compute for s in stage)
    busy = sum(s.end_ns - s.start_ns for stage in compute for s in stage)
    return 1 - busy / ((end - start) * len(compute))


def _on_threads(size: int, train: Callable[[int, Mailboxes], T]) -> list[T]:
    boxes = Mailboxes(size)

    def body(rank: int) -> T:
        try:
            return train(rank, boxes)
        except BaseException:
            boxes.break_all(rank)
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size)))
