"""The judgement about two runs, on made-up ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.commands.verify import _about_rounding
from shoal.observe.double_check import (
    MARGIN,
    CapturedRun,
    Difference,
    DoubleCheck,
    check,
    check_own,
    distance,
    worst,
)
from shoal.observe.verify import Verification, judge

LOSSES = [2.0, 1.5, 1.0]


def tensors(**changes: Tensor) -> dict[str, Tensor]:
    start = {
        "first.weight": torch.tensor([1.0, -2.0]),
        "first.bias": torch.tensor([0.5]),
        "norm.num_batches_tracked": torch.tensor(3),
    }
    return {**start, **{name.replace("__", "."): t for name, t in changes.items()}}


RUN = CapturedRun(
    losses=LOSSES,
    tensors=tensors(),
    additions=64,
    replicas_apart=0.0,
    switched_off=[],
    exact=False,
)


def never() -> CapturedRun:
    raise AssertionError("there is no need for a third run")


def judged(together: CapturedRun, reordered: CapturedRun | None = None) -> Verification:
    return judge(RUN, together, never if reordered is None else lambda: reordered)


def test_equal_runs_are_equal_without_a_third_run() -> None:
    verdict = judged(RUN)
    assert verdict.ok and not verdict.measured_rounding
    assert verdict.first_loss is None and verdict.first_tensor is None
    assert all(d.difference == 0.0 for d in [*verdict.losses, *verdict.tensors])
    assert [d.what for d in verdict.losses] == ["step 1", "step 2", "step 3"]
    assert [d.what for d in verdict.tensors] == list(RUN.tensors)


def test_rounding_within_the_plain_bound_needs_no_third_run() -> None:
    """64 additions and 3 steps in float32: 4 · 2⁻²⁴ · √192, times the largest element."""
    assert RUN.bound(torch.float32, 3) == pytest.approx(4 * 2**-24 * math.sqrt(192))
    moved = torch.tensor([1.0, -2.0 + 2**-20])
    verdict = judged(replace(RUN, tensors=tensors(first__weight=moved)))
    assert verdict.ok and not verdict.measured_rounding
    assert verdict.tensors[0].difference == 2**-20
    assert verdict.tensors[0].tolerance == pytest.approx(2 * RUN.bound(torch.float32, 3))


def test_what_another_order_of_additions_moves_is_the_tolerance_if_needed() -> None:
    together = replace(RUN, tensors=tensors(first__weight=torch.tensor([1.0, -2.001])))
    reordered = replace(RUN, tensors=tensors(first__weight=torch.tensor([1.0, -2.0005])))
    verdict = judged(together, reordered)
    assert verdict.ok and verdict.measured_rounding
    assert verdict.tensors[0].tolerance == pytest.approx(MARGIN * 0.0005, rel=1e-3)


def test_a_difference_that_rounding_does_not_explain_is_named() -> None:
    together = replace(
        RUN,
        losses=[2.0, 1.51, 1.02],
        tensors=tensors(first__bias=torch.tensor([0.6])),
    )
    verdict = judged(together, RUN)
    assert not verdict.ok
    assert verdict.first_loss is not None and verdict.first_loss.what == "step 2"
    assert verdict.first_tensor is not None and verdict.first_tensor.what == "first.bias"
    assert worst(verdict.losses).what == "step 3"
    assert worst(verdict.tensors).what == "first.bias"


def test_what_rounding_moved_in_one_loss_holds_for_the_later_ones() -> None:
    """Two runs that have drifted apart do not come together again by rounding."""
    together = replace(RUN, losses=[2.0, 1.5, 1.005])
    reordered = replace(RUN, losses=[2.0, 1.501, 1.0])
    verdict = judged(together, reordered)
    assert verdict.ok
    assert [d.tolerance for d in verdict.losses[1:]] == pytest.approx([0.01, 0.01], rel=1e-6)


FEWER = {name: t for name, t in tensors().items() if name != "first.bias"}


@pytest.mark.parametrize(
    ("loss", "tensor", "changes"),
    [
        ("step 2", None, {"losses": [2.0, math.nan, 1.0]}),
        ("step 2", None, {"losses": [2.0, math.inf, 1.0]}),
        (None, "first.bias", {"tensors": tensors(first__bias=torch.tensor([math.nan]))}),
        (None, "first.bias", {"tensors": tensors(first__bias=torch.tensor([math.inf]))}),
        (None, "first.bias", {"tensors": FEWER}),
        (None, "second.weight", {"tensors": tensors(second__weight=torch.ones(1))}),
        (None, "first.bias", {"tensors": tensors(first__bias=torch.tensor([[0.5]]))}),
        (
            *(None, "norm.num_batches_tracked"),
            {"tensors": tensors(norm__num_batches_tracked=torch.tensor(4))},
        ),
        ("step 3", None, {"losses": LOSSES[:2]}),
        ("step 4", None, {"losses": [*LOSSES, 0.5]}),
        (None, None, {"replicas_apart": 1e-9}),
    ],
)
def test_what_is_not_equal_is_named(
    loss: str | None, tensor: str | None, changes: dict[str, Any]
) -> None:
    """No number, a tensor that is missing, too many or of another shape; integers; steps."""
    verdict = judged(replace(RUN, **changes), RUN)
    assert not verdict.ok
    assert (verdict.first_loss and verdict.first_loss.what) == loss
    assert (verdict.first_tensor and verdict.first_tensor.what) == tensor
    if tensor == "first.bias":
        assert worst(verdict.tensors).what == tensor


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_run_that_broke_is_equal_to_nothing_and_excuses_nothing(bad: float) -> None:
    """The size of an infinite number is no tolerance."""
    lost = replace(RUN, losses=[2.0, bad, bad])
    split = replace(RUN, tensors=tensors(first__bias=torch.tensor([bad])))
    for broken in (lost, split):
        for together in (RUN, broken):
            assert not judge(broken, together, lambda broken=broken: broken).ok  # type: ignore[misc]
    assert not judged(replace(RUN, losses=[2.0, 1.6, 1.0]), lost).ok
    moved = replace(RUN, tensors=tensors(first__bias=torch.tensor([0.6])))
    assert not judged(moved, split).ok
    empty = replace(RUN, losses=[])
    assert not judge(empty, empty, lambda: empty).ok


def test_an_exact_run_has_to_have_the_same_bits() -> None:
    """exact=True promises more than rounding: the plain bound is no excuse."""
    exact = replace(RUN, exact=True)
    moved = replace(exact, tensors=tensors(first__weight=torch.tensor([1.0, -2.0 + 2**-22])))
    assert judge(exact, exact, never).ok
    assert not judge(exact, moved, lambda: exact).ok


def test_the_verdict_is_json() -> None:
    document = json.loads(json.dumps(judged(replace(RUN, losses=[2.0, 1.6, 1.0]), RUN).to_json()))
    assert (document["ok"], document["steps"], document["additions"]) == (False, 3, 64)
    assert document["first_loss_that_differs"]["what"] == "step 2"
    assert document["first_tensor_that_differs"] is None and document["rounding_measured"]


def test_distance_is_the_largest_difference_of_two_elements() -> None:
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])) == 2.0
    assert distance(torch.ones(0), torch.ones(0)) == 0.0
    infinite = torch.tensor([-math.inf, 1.0])
    assert distance(infinite, infinite.clone()) == 0.0, "a mask, say"


@pytest.mark.parametrize(("in_double", "expected"), [(1e-8, True), (1e-15, False)])
def test_amplification_in_double_precision_explains_a_larger_difference(
    in_double: float, expected: bool
) -> None:
    """5% of a later loss: rounding, if the same steps turn 1e-16 into 1e-8; else an error."""
    double = DoubleCheck([Difference("first.weight", in_double, 1e-6)], 3)
    together = replace(RUN, losses=[2.0, 1.5, 1.05])
    assert judge(RUN, together, lambda: RUN, double).ok is expected


# the same with the state of an optimizer, compared in double precision
MOMENTS = torch.tensor([0.1, 0.2])
ADAM = replace(
    RUN,
    losses=[2.0, 1.5],
    tensors={"weight": torch.tensor([1.0, -2.0])},
    start={"weight": torch.tensor([0.5, -1.0])},
    optimizer={"weight/exp_avg": MOMENTS, "weight/step": torch.tensor(2.0)},
)


def moved(by: float) -> CapturedRun:
    return replace(ADAM, tensors={"weight": torch.tensor([1.0, -2.0 + by])})


def wrong(by: float) -> CapturedRun:
    """The state of the optimizer is wrong by this part of it."""
    return replace(ADAM, optimizer=ADAM.optimizer | {"weight/exp_avg": MOMENTS * (1 + by)})


def test_rounding_that_training_amplifies_is_allowed_if_double_precision_is_equal() -> None:
    equal = check(ADAM, ADAM, ADAM, never)
    verdict = judge(ADAM, moved(0.01), never, equal)
    assert verdict.ok and verdict.amplified == ["weight"]
    assert not judge(ADAM, moved(0.5), lambda: ADAM, equal).ok, "more than 1%"
    assert judge(ADAM, moved(0.5), lambda: moved(0.2), equal).ok, "another order moves as much"
    plain = judge(ADAM, moved(1e-7), never, equal)
    assert plain.ok and plain.amplified == [] and plain.tensors[0].tolerance < 1e-4


def test_a_difference_in_double_precision_is_an_error_however_small() -> None:
    found = check(ADAM, ADAM, wrong(1e-5), lambda: ADAM)
    verdict = judge(ADAM, ADAM, never, found)
    assert not verdict.ok and verdict.is_equal
    assert found.worst.what == "weight/exp_avg of the optimizer"
    assert verdict.to_json()["double"]["ok"] is False


def test_parts_in_float32_are_measured_by_another_order() -> None:
    found = check(ADAM, ADAM, wrong(3e-6), lambda: wrong(1e-6))
    assert found.ok and found.was_reordered and found.worst.tolerance < 2e-5


@pytest.mark.parametrize("error", [1e-5, 5e-3])
def test_a_result_that_depends_on_the_order_of_samples_is_never_equal(error: float) -> None:
    again = replace(ADAM, optimizer=ADAM.optimizer | {"weight/exp_avg": MOMENTS.flip(0)})
    found = check(ADAM, ADAM, wrong(error), lambda: again)
    assert not found.ok and found.worst.tolerance == 1e-6
    assert found.order is not None and found.order.what == "weight/exp_avg of the optimizer"
    (said,) = (line for line in _about_rounding(judge(ADAM, ADAM, never, found)) if "cut" in line)
    assert "depends on how its batches are cut: on one worker, weight/exp_avg" in said


def test_a_tensor_that_is_missing_or_nan_is_not_equal() -> None:
    assert not check(ADAM, ADAM, replace(ADAM, tensors={}), lambda: ADAM).ok
    assert not check(ADAM, ADAM, replace(ADAM, optimizer={}), lambda: ADAM).ok
    assert not check(ADAM, ADAM, moved(math.nan), lambda: ADAM).ok
    assert not check_own(ADAM, replace(ADAM, optimizer={}), ADAM).ok


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (5e-6, True), (1e-4, False)])
def test_an_error_of_one_part_in_10000_is_found_where_rounding_is_smaller(
    error: float, ok: bool
) -> None:
    found = check_own(ADAM, wrong(error), wrong(1e-6))
    assert found.ok is ok
    assert found.least is not None and found.least.what == "weight"
    assert 5e-6 < found.least.tolerance < 2e-5, "ten times what another order changes"
    verdict = replace(judge(ADAM, wrong(error), lambda: ADAM), own=found)
    assert verdict.ok is ok and verdict.to_json()["own_precision"]["ok"] is ok
    assert any("of a gradient above 1e-05 of it" in line for line in _about_rounding(verdict))


def test_what_could_not_have_been_found_is_said() -> None:
    found = check_own(ADAM, wrong(1e-3), wrong(0.05))
    assert found.ok
    verdict = replace(judge(ADAM, ADAM, lambda: ADAM), own=found)
    assert list(_about_rounding(verdict))[-1].startswith("weight is all rounding")
