"""What a trace shows of a parameter server: a worker that waits for it is not idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from shoal.runtime.trace import COMMUNICATE, COMPUTE, TRAINING, WAIT, Recorder, Span
from shoal.train.step.run_services import RunServices
from tests.conftest import World
from tests.jobs import after_training
from tests.models import mlp, samples
from tests.server.helpers import launched
from tests.sync.test_ps_rows import OPTIMIZERS, Clicks
from tests.sync.test_ps_rows import data as clicks
from tests.test_equal import SGD

STEPS = 4


class Signalling(Recorder):
    """Sets `is_waiting` when the worker begins to wait for its pull number `pulls`."""

    def __init__(self, rank: int, pulls: int):
        super().__init__(rank, 0)
        self.is_waiting = threading.Event()
        self._pulls_left = pulls

    @contextmanager
    def span(self, kind: str, detail: str = "", *more: Any, **named: Any) -> Iterator[Any]:
        with super().span(kind, detail, *more, **named) as fields:
            self._pulls_left -= (kind, detail) == (WAIT, "pull")
            if self._pulls_left == 0:
                self.is_waiting.set()
            yield fields


def train(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str, tcp: bool, **options: Any
) -> None:
    options = {"optimizer": SGD, "data": samples(12 * STEPS), "batch_size": 12, **options}
    tracers = options.pop("tracers")
    with launched(monkeypatch, 2 if "servers=2" in strategy else 1, tcp):
        services = [RunServices(tracer=tracer) for tracer in tracers]
        after_training(world, 2, strategy, services=services, **options)


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
    models = [mlp(), mlp()]
    moments_ns: list[int] = []

    def wait(*_: object) -> None:
        """Worker 1 computes its first step when the other waits."""
        assert tracers[0].is_waiting.wait(60)
        moments_ns.append(time.monotonic_ns())

    models[1].register_forward_pre_hook(wait)
    make = iter(models).__next__
    train(world, monkeypatch, strategy, tcp, tracers=tracers, make=make)
    waits = [span for span in tracers[0].spans if span.kind == WAIT and span.track == "main"]
    assert any(span.start_ns <= moments_ns[0] <= span.end_ns for span in waits)


@pytest.mark.parametrize("tcp", [False, True], ids=["memory", "tcp"])
@pytest.mark.parametrize("rule", ["", ", staleness=1", ', mode="async"'])
def test_every_push_and_pull_is_recorded_and_every_span_is_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, rule: str, tcp: bool
) -> None:
    tracers = [Recorder(rank, 0) for rank in range(2)]
    train(world, monkeypatch, f"ps(servers=2{rule})", tcp, tracers=tracers)
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
    make = partial(Clicks, OPTIMIZERS["adam"])
    train(world, monkeypatch, "ps", False, tracers=tracers, make=make, data=clicks())
    for tracer in tracers:
        assert any("rows of" in detail for detail in details(tracer.spans, WAIT))
