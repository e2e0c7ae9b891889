"""Which server holds what, and the optimizer state that fits it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.server.consistency import Rule
from shoal.server.messages import ParameterSlice, ShardState, StateTensor
from shoal.server.model.named_optimizer import NamedOptimizer, step_without_hooks
from shoal.server.model.partition import FlatParameter, ServerSlice, partition
from shoal.server.model.shard import Shard
from shoal.server.model.shard_state import check_state
from shoal.server.protocol import Refused
from shoal.sync.ps.plan import ServedOptions, specs_of
from tests.server.helpers import flat_of

shapes = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


def parameters_of(shapes: list[tuple[int, ...]], offset: int) -> tuple[list[FlatParameter], int]:
    parameters = []
    at = offset
    for i, shape in enumerate(shapes):
        parameters.append(FlatParameter(f"p{i}", at, shape))
        at = -(-(at + math.prod(shape)) // 4) * 4
    return parameters, at


ABC = [FlatParameter("a", 4, (2, 2)), FlatParameter("b", 8, (8, 2)), FlatParameter("c", 24, (4,))]


def test_two_servers_and_a_matrix_larger_than_an_equal_slice() -> None:
    assert partition(ABC, 28, 2) == [
        ServerSlice(4, 16, (ParameterSlice(0, 4, 0, (2, 2)), ParameterSlice(1, 8, 0, (4, 2)))),
        ServerSlice(16, 28, (ParameterSlice(1, 16, 4, (4, 2)), ParameterSlice(2, 24, 0, (4,)))),
    ]


def test_without_rows_only_boundaries_of_parameters_count() -> None:
    slices = partition(ABC, 28, 2, by_rows=False)
    assert [(each.start, each.stop) for each in slices] == [(4, 8), (8, 28)]


@given(shapes, st.integers(1, 5), st.sampled_from([0, 16]), st.booleans())
def test_every_element_is_held_once(
    shapes: list[tuple[int, ...]], servers: int, offset: int, by_rows: bool
) -> None:
    parameters, size = parameters_of(shapes, offset)
    slices = partition(parameters, size, servers, by_rows)
    assert len(slices) == servers
    assert slices[0].start == offset and slices[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    for i, parameter in enumerate(parameters):
        held = [c for s in slices for c in s.slices if c.parameter == i]
        assert sum(math.prod(c.shape) for c in held) == math.prod(parameter.shape)
        rows = [r for c in held for r in range(c.first_row, c.first_row + c.shape[0])]
        assert rows == list(range(parameter.shape[0]))
        assert all(c.start == parameter.start + c.first_row * parameter.row_size for c in held)


@given(shapes, st.integers(1, 5))
def test_slices_differ_by_no_more_than_what_cannot_be_split(
    shapes: list[tuple[int, ...]], servers: int
) -> None:
    parameters, size = parameters_of(shapes, 0)
    fair = size / servers
    grains = [p.row_size if math.prod(p.shape) > fair else math.prod(p.shape) for p in parameters]
    for held in partition(parameters, size, servers):
        assert held.stop - held.start <= fair + max(grains) + 4


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
