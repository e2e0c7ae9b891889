"""Without double precision: what is found, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.commands.verify import _about_rounding
from shoal.observe.captured_run import CapturedRun
from shoal.observe.double_check import check_own
from shoal.observe.verify import judge
from tests.observe import test_double_check as double_check

RUN = replace(
    double_check.RUN,
    optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2]), "weight/step": torch.tensor(2.0)},
)


def wrong(by: float) -> CapturedRun:
    state = {"weight/exp_avg": torch.tensor([0.1, 0.2]) * (1 + by)}
    return replace(RUN, optimizer=RUN.optimizer | state)


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (5e-6, True), (1e-4, False)])
def test_an_error_of_one_part_in_10000_is_found_where_rounding_is_smaller(
    error: float, ok: bool
) -> None:
    found = check_own(RUN, wrong(error), wrong(1e-6))
    assert found.ok is ok
    assert found.least is not None and found.least.what == "weight"
    assert 5e-6 < found.least.tolerance < 2e-5, "ten times what another order changes"
    verdict = replace(judge(RUN, wrong(error), lambda: RUN), own=found)
    assert verdict.ok is ok and verdict.to_json()["own_precision"]["ok"] is ok
    assert any("of a gradient above 1e-05 of it" in line for line in _about_rounding(verdict))


def test_what_could_not_have_been_found_is_said() -> None:
    found = check_own(RUN, wrong(1e-3), wrong(0.05))
    assert found.ok
    verdict = replace(judge(RUN, RUN, lambda: RUN), own=found)
    assert list(_about_rounding(verdict))[-1].startswith("weight is all rounding")


def test_a_tensor_that_is_missing_is_not_equal() -> None:
    assert not check_own(RUN, replace(RUN, optimizer={}), RUN).ok
