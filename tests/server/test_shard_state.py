"""Optimizer state that a server is sent has to fit the slices that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.protocol import Refused
from shoal.server.consistency import Rule
from shoal.server.messages import ShardState, StateTensor
from shoal.server.model.named_optimizer import NamedOptimizer, step_without_hooks
from shoal.server.model.shard import Shard
from shoal.server.model.shard_state import check_state
from shoal.sync.ps.plan import ServedOptions, specs_of
from tests.server.helpers import flat_of

ADAM = NamedOptimizer("Adam", {"lr": 0.1, "fused": True})


def shard_of(optimizer: NamedOptimizer | None) -> Shard:
    return Shard(specs_of(flat_of(), ["a"], ServedOptions(Rule(1), optimizer=optimizer))[0])


def state(shard: Shard, **changes: Any) -> ShardState:
    """Adam's state of the first slice, with some of its tensors changed or left out (None)."""
    shape = tuple(shard.params[0].shape)
    forms: dict[str, Any] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape, **changes}
    dtypes = {key: "int64" if form == "int64" else "float32" for key, form in forms.items()}
    tensors = tuple(
        StateTensor(0, key, dtypes[key], shape if form == "int64" else form)  # type: ignore[arg-type]
        for key, form in forms.items()
        if form is not None
    )
    return ShardState(3, tensors, ())


def test_what_the_optimizer_has_made_itself_is_accepted() -> None:
    shard = shard_of(ADAM)
    slice_bytes = 4 * shard.params[0].numel()
    assert check_state(shard, state(shard)) == 4 * shard.size + 4 + 2 * slice_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"exp_avg": (1,)},
        {"exp_avg": ()},
        {"exp_avg_sq": None},
        {"step": (2,)},
        {"exp_avg": "int64"},
        {"max_exp_avg_sq": (1000, 1000)},
    ],
    ids=str,
)
def test_short_missing_and_other_tensors_are_refused(changes: dict[str, Any]) -> None:
    """A fused optimizer would write out of bounds."""
    shard = shard_of(ADAM)
    with pytest.raises(Refused, match="state of slice 0"):
        check_state(shard, state(shard, **changes))


def test_a_number_in_the_place_of_a_tensor_is_refused() -> None:
    shard = shard_of(ADAM)
    with pytest.raises(Refused, match="is a number, and a tensor is needed"):
        check_state(shard, ShardState(3, (), ((0, "exp_avg", 5),)))


def test_a_server_without_an_optimizer_takes_no_state() -> None:
    shard = shard_of(None)
    with pytest.raises(Refused, match="without an optimizer"):
        check_state(shard, state(shard))


def test_the_step_without_hooks_is_the_same_step() -> None:
    results = []
    for is_plain in (False, True):
        p = torch.nn.Parameter(torch.ones(6))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        step = step_without_hooks(optimizer) if is_plain else optimizer.step
        p.grad = torch.arange(6.0)
        step()
        assert len(calls) == (0 if is_plain else 1)
        results.append(p.detach())
    assert torch.equal(*results)
