"""Tables of rows: who owns which, what they start as, and how they are trained."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import BadInput
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.embedding.table import RowTable
from tests.processes import resident_mb

SGD = RowOptimizer("sgd", lr=0.5)
ANY_SGD: Any = torch.optim.SGD
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adagrad from 0.1": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "adam": partial(torch.optim.SparseAdam, lr=0.05, betas=(0.8, 0.9)),
}


def spec(num_rows: int = 50, dim: int = 3, **more: Any) -> TableSpec:
    return TableSpec("users", num_rows, dim, **{"optimizer": SGD, **more})


def every_id(table: TableSpec) -> Tensor:
    return torch.arange(table.num_rows)


def cut(table: TableSpec, shards: int) -> list[Tensor]:
    """The ids of each shard."""
    owners = table.owner(every_id(table), shards)
    return [every_id(table)[owners == shard] for shard in range(shards)]


# ------------------------------------------------------------------------------ who owns what


@given(num_rows=st.integers(1, 2000), shards=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_shards_own_equally_many_rows_to_within_one(num_rows: int, shards: int) -> None:
    table = spec(num_rows)
    counts = [len(ids) for ids in cut(table, shards)]
    assert counts == [table.rows_of(shard, shards) for shard in range(shards)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 64])
def test_ids_in_a_row_are_spread(shards: int, stride: int) -> None:
    """512 ids at any distance: each shard gets its part to within 5 standard deviations."""
    owners = spec(1 << 20).owner(torch.arange(512) * stride, shards)
    expected = 512 / shards
    for found in torch.bincount(owners, minlength=shards).tolist():
        assert abs(found - expected) < 5 * (expected * (1 - 1 / shards)) ** 0.5


def test_tables_of_one_size_are_spread_differently() -> None:
    ids = torch.arange(1000)
    first, second = (TableSpec(name, 1000, 1).owner(ids, 2) for name in ("users", "items"))
    assert 400 < int((first == second).sum()) < 600


# ------------------------------------------------------------------------------ what rows start as


@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_a_row_starts_the_same_on_any_number_of_shards_and_in_any_order(dim: int) -> None:
    table = spec(40, dim)
    whole = RowTable(table).pull(every_id(table))
    for shards in (2, 3, 50):
        for shard, ids in enumerate(cut(table, shards)):
            part = RowTable(table, shard, shards)
            for i in random.Random(0).sample(range(len(ids)), len(ids)):
                part.pull(ids[i : i + 1])
            assert torch.equal(part.pull(ids), whole[ids])


def test_rows_start_as_asked() -> None:
    ids = torch.arange(20_000)
    normal = spec(20_000, 9, scale=0.5).initial(ids).double()
    assert normal.mean().abs() < 0.01 and abs(normal.std() - 0.5) < 0.01
    assert abs((normal**4).mean() / normal.var() ** 2 - 3) < 0.1  # as thick in the tails
    columns = torch.corrcoef(normal.T) - torch.eye(9)
    assert columns.abs().max() < 0.05
    uniform = spec(20_000, 9, init="uniform", scale=0.5).initial(ids).double()
    assert uniform.min() >= -0.5 and uniform.max() <= 0.5
    assert uniform.mean().abs() < 0.01 and abs(uniform.std() - 0.5 / 3**0.5) < 0.01
    assert not spec(20_000, 9, init="zeros").initial(ids).any()


def test_rows_that_are_not_used_take_no_memory() -> None:
    """1.3 GB of rows, twice that of averages: 10,000 used rows take about 4 MB of it."""
    before = resident_mb()
    table = RowTable(spec(10_000_000, 32, optimizer=RowOptimizer("adam", 0.1, 1e-8, (0.9, 0.9))))
    ids = torch.randperm(10_000_000)[:10_000].clone()
    table.push(ids, torch.ones(10_000, 32))
    assert len(table) == 10_000
    # 40 MB of index, 80 MB for the numbers to draw from, and what the allocator likes to keep
    assert resident_mb() - before < 300


# ------------------------------------------------------------------------------ training


def test_what_is_pulled_is_a_copy() -> None:
    table = RowTable(spec())
    first = table.pull(torch.tensor([1]))
    first.zero_()
    assert table.pull(torch.tensor([1])).all()


def test_a_table_without_an_optimizer_can_be_read_only() -> None:
    table = RowTable(spec(optimizer=None))
    assert table.pull(torch.tensor([1, 2])).shape == (2, 3)
    with pytest.raises(BadInput, match="table 'users' has no optimizer"):
        table.push(torch.tensor([1]), torch.zeros(1, 3))


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "ids, complaint",
    [
        (torch.tensor([3, -1, 5]), "table 'users' has no row -1: ids are 0 to 49"),
        (torch.tensor([3, 50]), "has no row 50"),
        (torch.tensor([2**63 - 1, 0]), f"has no row {2**63 - 1}"),
        (torch.tensor([-(2**63)]), f"has no row {-(2**63)}"),
        (torch.tensor([1.0]), r"int64 tensor on the CPU, not \(1,\) of torch.float32"),
        (torch.tensor([1], dtype=torch.int32), "torch.int32"),
        (torch.tensor(1), r"not \(\) of torch.int64"),
        (torch.zeros(2, 2, dtype=torch.int64), r"not \(2, 2\)"),
    ],
)
def test_bad_ids_are_refused_and_nothing_is_touched(ids: Tensor, complaint: str) -> None:
    table = RowTable(spec())
    with pytest.raises(BadInput, match=complaint):
        table.pull(ids)
    with pytest.raises(BadInput, match=complaint):
        table.push(ids, torch.zeros(ids.numel(), 3))
    assert len(table) == 0 and table.steps == 0


@pytest.mark.parametrize(
    "grads",
    [torch.zeros(2, 4), torch.zeros(1, 3), torch.zeros(6), torch.zeros(2, 3).double()],
    ids=["wide", "short", "flat", "double"],
)
def test_bad_gradients_are_refused_and_nothing_is_touched(grads: Tensor) -> None:
    table = RowTable(spec())
    with pytest.raises(
        BadInput, match=r"gradients of table 'users' must be \(2, 3\) of torch.float32"
    ):
        table.push(torch.tensor([1, 2]), grads)
    assert len(table) == 0 and table.steps == 0


@pytest.mark.parametrize("lr, step", [(float("nan"), None), (float("inf"), 1), (0.1, 0)])
def test_bad_rates_and_steps_are_refused(lr: float, step: int | None) -> None:
    table = RowTable(spec())
    with pytest.raises(BadInput, match="cannot be updated"):
        table.push(torch.tensor([1]), torch.zeros(1, 3), lr, step)
    assert len(table) == 0


def test_an_id_of_another_shard_is_refused_by_number() -> None:
    table = spec()
    mine, other = cut(table, 2)
    shard = RowTable(table, 0, 2)
    with pytest.raises(BadInput, match=f"row {other[4]} of table 'users' is not owned by shard 0"):
        shard.pull(torch.cat([mine, other[4:]]))
    assert len(shard) == 0


def test_a_table_that_is_too_large_for_its_servers_is_refused() -> None:
    with pytest.raises(BadInput, match="too many rows for 1 server:"):
        RowTable(spec(2**40))
    with pytest.raises(BadInput, match="shard 0 of table 'users' does not fit"):
        RowTable(spec(2**30, 2**20))


# ------------------------------------------------------------------------------ optimizers


def test_optimizers_are_read_from_factories_of_torch() -> None:
    of = RowOptimizer.of
    assert of(partial(torch.optim.SGD, lr=0.5)) == SGD
    assert of(SGD) == SGD
    assert of(torch.optim.Adagrad) == RowOptimizer("adagrad", lr=0.01, eps=1e-10)
    adam = RowOptimizer("adam", lr=0.001, eps=1e-8, betas=(0.9, 0.999))
    assert of(torch.optim.Adam) == of(partial(torch.optim.SparseAdam)) == adam
    assert of(partial(partial(torch.optim.Adam, lr=1.0), lr=0.001, fused=True)) == adam
    assert of(partial(torch.optim.SGD, lr=0.5, momentum=0, weight_decay=0.0)) == SGD


@pytest.mark.parametrize(
    "factory, named",
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), r"SGD\(momentum=0.9\)"),
        (partial(torch.optim.Adam, weight_decay=0.1), r"Adam\(weight_decay=0.1\)"),
        (partial(torch.optim.Adam, amsgrad=True), r"Adam\(amsgrad=True\)"),
        (partial(torch.optim.Adagrad, lr_decay=0.1), r"Adagrad\(lr_decay=0.1\)"),
        (partial(ANY_SGD, nonsense=1), r"SGD\(nonsense=1\)"),
        (partial(torch.optim.AdamW, lr=0.1), "AdamW"),
        (lambda pairs: torch.optim.SGD(pairs, lr=0.1), "<lambda>"),
        (None, "None"),
    ],
)
def test_other_optimizers_are_refused_by_name(factory: Any, named: str) -> None:
    with pytest.raises(BadInput, match=f"cannot be trained by {named}: .*Adagrad"):
        RowOptimizer.of(factory)


# ------------------------------------------------------------------------------ saving


def test_saved_rows_that_do_not_fit_are_refused() -> None:
    table = spec(60, 3, optimizer=RowOptimizer.of(OPTIMIZERS["adagrad"]))
    used = RowTable(table)
    used.push(torch.arange(30), torch.ones(30, 3))
    (chunk,) = used.state()
    fresh = RowTable(table)
    for damaged, complaint in [
        ({**chunk, "ids": chunk["ids"] + 50}, "has no row"),
        ({**chunk, "rows": chunk["rows"][:, :2]}, "rows of table 'users' must be"),
        ({**chunk, "sum": chunk["sum"].double()}, "sum of table 'users' must be"),
        ({"ids": chunk["ids"], "rows": chunk["rows"]}, "another optimizer"),
        ({**chunk, "more": chunk["sum"]}, "another optimizer"),
    ]:
        with pytest.raises(BadInput, match=complaint):
            fresh.load_state([damaged], steps=1)
        assert len(fresh) == 0
    with pytest.raises(BadInput, match="cannot have been updated -1 times"):
        fresh.load_state([chunk], steps=-1)


def test_another_optimizer_starts_without_a_memory() -> None:
    table = RowTable(spec(4, 1, init="zeros", optimizer=RowOptimizer("adagrad", lr=1.0)))
    table.push(torch.tensor([0]), torch.full((1, 1), 3.0))
    assert table.pull(torch.tensor([0])).item() == -1.0
    table.set_optimizer(RowOptimizer("adagrad", lr=1.0, initial_accumulator_value=16.0))
    table.push(torch.tensor([0]), torch.full((1, 1), 3.0))
    assert table.pull(torch.tensor([0])).item() == pytest.approx(-1.6)  # 3 / sqrt(16 + 9)
