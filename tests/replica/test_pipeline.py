"""The engine of a stage: what lives when, what is sent, what is traced."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.pipeline.stage_io import PipelineStage
from shoal.runtime.trace import Recorder
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.schedules.pipelines.proof import prove
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.models import samples

SGD = partial(torch.optim.SGD, lr=0.1)


class Alive:
    """How many graphs of one worker are alive, and the most there were at once."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def begin(self, marker: object) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(marker, self.end)

    def end(self) -> None:
        self.now -= 1


class Marker:
    pass


class Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: Alive) -> Tensor:
        ctx.marker = Marker()
        if any(ctx.needs_input_grad):
            alive.begin(ctx.marker)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Watched(nn.Module):
    def __init__(self, alive: Alive):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.alive = alive

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Watch.apply(self.linear(x), self.alive)
        return out


def peaks(world: World, strategy: str, stages: int, layers: int) -> list[int]:
    alive = [Alive() for _ in range(stages)]
    models = [nn.Sequential(*(Watched(a) for _ in range(layers))) for a in alive]

    def body(group: Group) -> None:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(32, classes=6), 16):
            step(batch)
            if step.steps == 1:  # before it the first stage had a graph of the whole model
                assert alive[group.rank].now == 0
                alive[group.rank].most = 0

    world(stages, body)
    assert all(a.now == 0 for a in alive)
    return [a.most for a in alive]


@pytest.mark.parametrize("schedule", schedules())
def test_as_many_activations_live_as_the_proof_says(world: World, schedule: str) -> None:
    pipeline = build(schedule, 3, 8)
    strategy = f'pp(3, schedule="{schedule}", microbatches=8)'
    found = peaks(world, strategy, 3, layers=3 * pipeline.chunks)
    assert found == list(prove(pipeline).peak_live)


def test_recomputing_keeps_one_graph_at_a_time(world: World) -> None:
    for schedule in ("gpipe", "1f1b"):
        strategy = f'pp(3, schedule="{schedule}", microbatches=8, recompute=True)'
        assert peaks(world, strategy, 3, 3) == [1, 1, 1]


def test_what_was_taken_is_let_go_during_the_step(world: World) -> None:
    """Of 16 micro-batches no more than a few are held for sending, under 1F1B."""
    models = [nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))) for _ in range(3)]

    def body(group: Group) -> int:
        job = Job(parse("pp(3, microbatches=16)"), group, device=torch.device("cpu"))
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        stage = step.engine.stage
        most = 0
        assert isinstance(stage, PipelineStage)
        messages = stage.messages
        send = messages.send

        def counting(*args: Any) -> None:
            nonlocal most
            send(*args)
            most = max(most, sum(map(len, messages.held.values())))

        messages.send = counting  # type: ignore[method-assign]
        for batch in job.batches(samples(32, classes=6), 32):
            step(batch)
        return most

    assert max(world(3, body)) <= 2 * 3


def test_every_action_leaves_a_span(world: World) -> None:
    models = [nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))) for _ in range(2)]

    def body(group: Group) -> list[str]:
        tracer = Recorder(group.rank, time.monotonic_ns())
        strategy = parse('pp(2, schedule="zb-h1", microbatches=2)')
        job = Job(strategy, group, device=torch.device("cpu"), services=RunServices(tracer=tracer))
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(8, classes=6), 8):
            step(batch)
        kinds = ("forward", "backward", "send", "wait")
        return [f"{s.kind} {s.detail}" for s in tracer.spans if s.kind in kinds]

    first, last = world(2, body)
    assert first == [
        *("forward F0", "send F0", "forward F1", "send F1"),
        *("wait receive I0", "backward I0", "backward W0"),
        *("wait receive I1", "backward I1", "backward W1"),
    ]
    assert last == [
        *("wait receive F0", "forward F0", "backward I0", "send I0"),
        *("wait receive F1", "forward F1", "backward I1", "send I1"),
        *("backward W0", "backward W1"),
    ]
