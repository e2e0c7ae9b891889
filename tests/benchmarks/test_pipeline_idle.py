"""The idle share of a traced step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.pipeline_idle import Slow, compare, idle_fraction
from shoal.replica.pipeline.split_backward import SplitBackward
from shoal.runtime.trace import Span


def span(kind: str, start: int, end: int) -> Span:
    return Span(kind, start, end, "main", "")


def test_idle_is_what_is_not_computing_from_the_first_begin_to_the_last_end() -> None:
    first = [span("forward", 10, 20), span("wait", 20, 40), span("backward", 40, 50)]
    second = [span("wait", 0, 20), span("forward", 20, 30), span("backward", 30, 40)]
    assert idle_fraction([first, second]) == pytest.approx(1 - 40 / 80)


def test_a_slow_layer_sleeps_once_in_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.pipeline_idle.time.sleep", slept.append)
    layer = Slow(0.5)
    out = layer(torch.ones(2, 4))
    assert sum(slept) == 0.5
    split = SplitBackward([out.sum()], [None])
    split.input_grads([])
    assert sum(slept) == 1.0
    assert len(split.weight_grads()) == len(list(nn.Module.parameters(layer)))
    assert sum(slept) == 1.5


def test_a_run_is_traced_and_simulated() -> None:
    found = compare("gpipe", stages=2, microbatches=2, action_s=0.001, steps=1)
    assert found["simulated_idle"] == pytest.approx(1 / 3)
    assert 0 < found["traced_idle"] < 1
