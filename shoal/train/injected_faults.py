"""`--slow` and `--kill` around what computes a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from shoal.observe.trace import INJECTED, Tracer
from shoal.runtime.faults import busy_s
from shoal.train.step_context import StepContext

P = ParamSpec("P")
T = TypeVar("T")


def with_faults(
    compute: Callable[P, T], context: StepContext, step_number: Callable[[], int]
) -> Callable[P, T]:
    """What computes a step, with the faults around it that were asked for."""
    if context.faults is None:
        return compute
    clock = _clock_of(context.device)
    return context.faults.around(compute, step_number, clock, _sleep_of(context.tracer))


def _sleep_of(tracer: Tracer) -> Callable[[float], None]:
    """A sleep that a trace shows: it is neither computing nor idling."""

    def sleep(seconds: float) -> None:
        with tracer.span(INJECTED, "--slow"):
            time.sleep(seconds)

    return sleep


def _clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that measures computing time."""
    if device.type != "cuda":
        return busy_s

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.monotonic()

    return read
