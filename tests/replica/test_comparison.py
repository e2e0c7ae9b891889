"""Comparing what two computations gave."""

from __future__ import annotations

import math

import torch

from shoal.replica.split.comparison import gradients_of, is_close


def test_nan_in_the_same_places_is_equal_and_hides_no_difference() -> None:
    expected = torch.tensor([1.0, math.nan, 3.0])
    assert is_close(expected, expected.clone())
    assert not is_close(expected, torch.tensor([1.0, math.nan, 3.1]))
    assert not is_close(expected, torch.tensor([1.0, 2.0, 3.0]))


def test_an_output_of_nan_does_not_hide_gradients_of_the_others() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = [torch.stack([weight[0] * 2, weight[1] * 3, torch.tensor(math.nan)])]
    gradient = gradients_of(outputs, {"weight": weight})["weight"]
    assert gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.all())
