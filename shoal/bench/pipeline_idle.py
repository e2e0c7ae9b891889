"""How long the stages of a pipeline idle: traced, beside what the simulation says.

Layers sleep instead of computing, so that few cores can play many stages; each stage is a thread.
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

from shoal.comm.executors.scheduled.executor import Scheduled
from shoal.comm.group import Group
from shoal.observe.trace import Recorder, Span
from shoal.plan.timeline import Times, simulate
from shoal.schedules.collectives.cost import Link
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import parse
from shoal.train.job import Job, RunServices
from shoal.transport.threads import Mailboxes, ThreadTransport

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
    """The idle share of a step, the median of `steps`, beside the simulated one.

    Each of F, I and W takes `action_s`.
    """
    pipeline = build(schedule, stages, microbatches)
    simulated = simulate(pipeline, Times(action_s, action_s, action_s)).idle
    layers = stages * pipeline.chunks
    cuts = [str(place) for place in range(1, layers)]
    names = ", ".join(f'"{cut}"' for cut in cuts)
    strategy = f'pp({stages}, schedule="{schedule}", microbatches={microbatches}, cuts=[{names}])'

    def train(rank: int, boxes: Mailboxes) -> list[list[Span]]:
        tracer = Recorder(rank, 0)
        group = Group(Scheduled(ThreadTransport(boxes, rank), link=Link()))
        job = Job(
            parse(strategy), group, device=torch.device("cpu"), services=RunServices(tracer=tracer)
        )
        model = nn.Sequential(*(Slow(action_s / pipeline.chunks) for _ in range(layers)))
        step = job.step(model, nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.0))
        batch = torch.zeros(microbatches, 4), torch.zeros(microbatches, 4)
        found = []
        for part in job.batches([batch] * (steps + 1)):
            group.barrier().wait()
            tracer.spans = []
            step(part)
            found.append(tracer.spans)
        return found[1:]  # the first step is also checked

    spans = _on_threads(stages, train)
    return {
        "schedule": schedule,
        "stages": stages,
        "microbatches": microbatches,
        "chunks": pipeline.chunks,
        "simulated_idle": simulated,
        "traced_idle": statistics.median(
            idle_share(list(step)) for step in zip(*spans, strict=True)
        ),
    }


def idle_share(spans: list[list[Span]]) -> float:
    """The part of all stages' time in which they do not compute, from the first to the last."""
    work = [[s for s in own if s.kind in ("forward", "backward")] for own in spans]
    start = min(s.start_ns for own in work for s in own)
    end = max(s.end_ns for own in work for s in own)
    busy = sum(s.end_ns - s.start_ns for own in work for s in own)
    return 1 - busy / ((end - start) * len(work))


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
