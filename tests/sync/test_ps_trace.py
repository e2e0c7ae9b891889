"""What a trace shows of a parameter server: a worker that waits for it is not idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.runtime.trace import COMMUNICATE, COMPUTE, TRAINING, WAIT, Recorder, Span
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.models import mlp, samples
from tests.server.helpers import launched
from tests.sync.test_ps_rows import OPTIMIZERS, Clicks
from tests.sync.test_ps_rows import data as clicks
from tests.test_equal import SGD

CPU = torch.device("cpu")
STEPS = 4


class Signalling(Recorder):
    """Sets `is_waiting` when the worker begins to wait for its pull number `pulls`."""

    def __init__(self, rank: int, pulls: int):
        super().__init__(rank, 0)
        self.is_waiting = threading.Event()
        self._pulls_left = pulls

    @contextmanager
    def span(self, kind: str, detail: str = "") -> Iterator[None]:
        with super().span(kind, detail):
            self._pulls_left -= (kind, detail) == (WAIT, "pull")
            if self._pulls_left == 0:
                self.is_waiting.set()
            yield


class Late(nn.Module):
    """Computes its first step when the other worker waits; `moment_ns` is that time."""

    def __init__(self, other: Signalling):
        super().__init__()
        self.net = mlp()
        self.other = other
        self.moment_ns = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.moment_ns:
            assert self.other.is_waiting.wait(60)
            self.moment_ns = time.monotonic_ns()
        out: Tensor = self.net(x)
        return out


def train(group: Group, strategy: str, model: nn.Module, tracer: Recorder) -> None:
    job = Job(parse(strategy), group, device=CPU, services=RunServices(tracer=tracer))
    step = job.step(model, F.cross_entropy, optimizer=SGD)
    for batch in job.batches(samples(12 * STEPS), 12):
        step(batch)
    job.close()


def details(spans: list[Span], kind: str) -> set[str]:
    return {span.detail for span in spans if span.kind == kind}


@pytest.mark.parametrize("tcp", [False, True], ids=["memory", "tcp"])
@pytest.mark.parametrize(
    ("strategy", "pulls"),
    [("ps", 1), ('ps(update="worker")', 1), ("ps(quorum=1)", 1), ("ps(staleness=1)", 2)],
)
def test_a_worker_that_waits_for_another_is_in_a_wait_span(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str, pulls: int, tcp: bool
) -> None:
    tracers = [Signalling(rank, pulls) for rank in range(2)]
    late = Late(tracers[0])
    models = [mlp(), late]
    with launched(monkeypatch, 1, tcp):
        world(2, lambda g: train(g, strategy, models[g.rank], tracers[g.rank]))
    waits = [span for span in tracers[0].spans if span.kind == WAIT and span.track == "main"]
    assert any(span.start_ns <= late.moment_ns <= span.end_ns for span in waits)


@pytest.mark.parametrize("tcp", [False, True], ids=["memory", "tcp"])
@pytest.mark.parametrize("strategy", ["ps", "ps(staleness=1)", 'ps(mode="async")'])
def test_every_push_and_pull_is_recorded_and_every_span_is_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str, tcp: bool
) -> None:
    tracers = [Recorder(rank, 0) for rank in range(2)]
    with launched(monkeypatch, 2, tcp):
        sized = strategy.replace("ps(", "ps(servers=2, ") if "(" in strategy else "ps(servers=2)"
        world(2, lambda g: train(g, sized, mlp(), tracers[g.rank]))
    for tracer in tracers:
        spans = tracer.spans
        assert {span.kind for span in spans} <= {*COMPUTE, *COMMUNICATE, WAIT, *TRAINING}
        assert {f"push step {step}" for step in range(STEPS)} <= details(spans, WAIT)
        sent = {"COMMIT", "BUCKET"} if tcp else {"COMMIT"}  # in memory nothing else is sent
        assert sent <= details(spans, "push")
        assert details(spans, "pull") >= {"PULL"}
        for server in range(2):
            assert {f"push server {server}", f"pull server {server}"} <= {s.track for s in spans}


def test_a_pull_of_rows_is_a_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tracers = [Recorder(rank, 0) for rank in range(2)]

    def body(group: Group) -> None:
        services = RunServices(tracer=tracers[group.rank])
        job = Job(parse("ps"), group, device=CPU, services=services)
        step = job.step(Clicks(OPTIMIZERS["adam"]), F.cross_entropy, optimizer=SGD)
        for batch in job.batches(clicks(), 12):
            step(batch)
        job.close()

    with launched(monkeypatch, 1):
        world(2, body)
    for tracer in tracers:
        assert any("rows of" in detail for detail in details(tracer.spans, WAIT))
