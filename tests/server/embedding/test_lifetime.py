"""Rows that come and go: `min_count` and `ttl_steps`, on any number of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
from shoal.errors import BadInput
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.embedding.table import RowTable
from tests.processes import resident_mb
from tests.server.embedding.test_table import OPTIMIZERS

ADAGRAD = RowOptimizer("adagrad", 0.1, 1e-10)
ROWS = 12
Steps = list[list[int]]
steps_of_ids = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=4), max_size=25)


def spec(**more: Any) -> TableSpec:
    return TableSpec("users", ROWS, 2, **{"optimizer": ADAGRAD, **more})


def grads_of(ids: Tensor, step: int) -> Tensor:
    return torch.sin(ids[:, None] + torch.tensor([1.0 * step, 2.0]))


def push(parts: list[RowTable], ids: list[int], step: int) -> None:
    """One update; a shard that has none of the rows counts it, too."""
    wanted = torch.tensor(ids, dtype=torch.int64)
    owners = parts[0].spec.owner(wanted, len(parts))
    for shard, part in enumerate(parts):
        mine = wanted[owners == shard]
        part.push(mine, grads_of(mine, step), step=step)


def pulled(parts: list[RowTable]) -> Tensor:
    ids = torch.arange(ROWS)
    owners = parts[0].spec.owner(ids, len(parts))
    rows = torch.zeros(ROWS, 2)
    for shard, part in enumerate(parts):
        rows[owners == shard] = part.pull(ids[owners == shard])
    return rows


class Model:
    """What the rule says, row by row, with a table of its own for each life of a row."""

    def __init__(self, table: TableSpec):
        self.spec = table
        self.kept = TableSpec("users", ROWS, 2, optimizer=ADAGRAD)
        self.lives: dict[int, tuple[RowTable | None, int, int]] = {}  # table, count, last step

    def push(self, ids: list[int], step: int) -> None:
        ttl = self.spec.ttl_steps
        for row in sorted(set(ids)):
            life, count, _ = self.lives.get(row, (None, 0, 0))
            count += 1
            if count >= self.spec.min_count:
                life = life or RowTable(self.kept)
                same = torch.tensor([i for i in ids if i == row])
                life.push(same, grads_of(same, step), step=step)
            self.lives[row] = (life, count, step)
        if ttl is not None:
            self.lives = {r: each for r, each in self.lives.items() if step - each[2] < ttl}

    def rows(self) -> Tensor:
        rows = self.spec.initial(torch.arange(ROWS))
        for row, (life, _, _) in self.lives.items():
            if life is not None:
                rows[row] = life.pull(torch.tensor([row]))[0]
        return rows

    @property
    def trained(self) -> int:
        return sum(life is not None for life, _, _ in self.lives.values())


@given(
    history=steps_of_ids,
    min_count=st.integers(1, 4),
    ttl=st.none() | st.integers(1, 9),
    shards=st.integers(1, 4),
    placement=st.sampled_from(["hash", "range"]),
)
@settings(max_examples=25, deadline=None)
def test_rows_come_and_go_as_the_rule_says(
    history: Steps, min_count: int, ttl: int | None, shards: int, placement: Any
) -> None:
    table = spec(min_count=min_count, ttl_steps=ttl, placement=placement)
    parts = [RowTable(table, shard, shards) for shard in range(shards)]
    model = Model(table)
    for step, ids in enumerate(history, 1):
        push(parts, ids, step)
        model.push(ids, step)
        torch.testing.assert_close(pulled(parts), model.rows(), rtol=0, atol=0)
    if not table.keeps_rows:
        assert sum(map(len, parts)) == model.trained


@given(
    history=steps_of_ids,
    at=st.integers(0, 25),
    min_count=st.integers(1, 4),
    ttl=st.none() | st.integers(1, 9),
    shards=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
)
@settings(max_examples=25, deadline=None)
def test_a_saved_table_goes_on_at_any_number_of_shards(
    history: Steps,
    at: int,
    min_count: int,
    ttl: int | None,
    shards: tuple[int, int],
    optimizer: str,
) -> None:
    trained_by = RowOptimizer.of(OPTIMIZERS[optimizer])
    table = spec(min_count=min_count, ttl_steps=ttl, optimizer=trained_by)
    whole = [RowTable(table)]
    parts = [RowTable(table, shard, shards[0]) for shard in range(shards[0])]
    for step, ids in enumerate(history, 1):
        if step == at:
            chunks = [chunk for part in parts for chunk in part.state(chunk_rows=3)]
            assert all(len(ids) <= 3 for chunk in chunks for ids in chunk.values())
            parts = [RowTable(table, shard, shards[1]) for shard in range(shards[1])]
            push(parts, [0, 3, 5], 1)  # what was there before does not stay
            for part in parts:
                part.load_state(chunks, step - 1)
        push(parts, ids, step)
        push(whole, ids, step)
    assert torch.equal(pulled(parts), pulled(whole))


def test_reading_rows_keeps_nothing_of_them() -> None:
    table = RowTable(spec(min_count=2))
    table.pull(torch.arange(ROWS))
    assert len(table) == 0 and list(table.state()) == []


def test_rows_that_leave_give_their_memory_back() -> None:
    """Each step brings 10,000 other rows of 2048 bytes: 12 steps would take 240 MB."""
    table = RowTable(TableSpec("t", 1_000_000, 256, "zeros", optimizer=ADAGRAD, ttl_steps=2))
    grads = torch.ones(10_000, 256)
    table.push(torch.arange(10_000), grads)
    before = resident_mb()
    for step in range(1, 12):
        table.push(torch.arange(10_000) + step * 10_000, grads)
    assert len(table) == 20_000
    assert resident_mb() - before < 100
    for _ in range(3):
        table.push(torch.tensor([5]), torch.ones(1, 256))
    assert len(table) == 1


def test_a_table_may_be_saved_without_a_lifetime_and_go_on_with_one() -> None:
    before = RowTable(spec())
    push([before], [1, 2], 1)
    after = RowTable(spec(min_count=3, ttl_steps=2))
    after.load_state(before.state(), 1)
    assert torch.equal(after.pull(torch.tensor([1, 2])), before.pull(torch.tensor([1, 2])))
    for step in (2, 3):
        push([after], [1], step)
    assert len(after) == 1
    back = RowTable(spec())
    back.load_state(after.state(), 3)
    assert torch.equal(back.pull(torch.arange(ROWS)), after.pull(torch.arange(ROWS)))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"last": torch.tensor([7])}, "last of table 'users' must be from 0 to 1"),
        ({"last": torch.tensor([-1])}, "from 0 to 1"),
        ({"last": torch.tensor([1.0])}, "must be one int64 for each row"),
        ({"waiting_ids": torch.tensor([99])}, "has no row 99"),
        ({"waiting_count": torch.tensor([1, 2])}, "must be one int64"),
    ],
)
def test_a_damaged_lifetime_is_refused(damage: dict[str, Tensor], complaint: str) -> None:
    table = RowTable(spec(min_count=2, ttl_steps=5))
    chunk = {
        "ids": torch.tensor([1]),
        "rows": torch.zeros(1, 2),
        "sum": torch.zeros(1, 2),
        "last": torch.tensor([1]),
        "waiting_ids": torch.tensor([3]),
        "waiting_count": torch.tensor([1]),
        "waiting_last": torch.tensor([1]),
    }
    table.load_state([chunk], 1)
    with pytest.raises(BadInput, match=complaint):
        table.load_state([{**chunk, **damage}], 1)
    assert len(table) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_rows": 0}, r"^shoal.Embedding\(0, 2\): num_rows must be .*not 0"),
        ({"num_rows": 2**63}, "rows"),
        ({"dim": -1, "name": "ads"}, "^table 'ads': dim must be .*not -1"),
        ({"padding_idx": 10}, "padding_idx=10 is out of range"),
        ({"optimizer": torch.optim.AdamW}, "trained by AdamW"),
        ({"init": "ones"}, "init must be"),
        ({"scale": float("nan")}, "scale must be"),
        ({"min_count": 1.5}, "min_count must be from 1"),
        ({"ttl_steps": 0}, "ttl_steps must be from 1"),
        ({"placement": "random"}, 'placement must be "hash" or "range"'),
        ({"hot_share": 1.0}, "hot_share must be a share of all pulls"),
        ({"cache_steps": -1}, "cache_steps must be from 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        shoal.Embedding(**{"num_rows": 10, "dim": 2, **options})
