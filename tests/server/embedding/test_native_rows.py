"""Counting, placing, routing and copying of rows: the native calls do what numpy would."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.server.embedding import native
from shoal.server.embedding.hashing import MAX_DIRECT_ROWS, IdMap, Permutation, key_of
from shoal.server.embedding.heat import IdCounts
from shoal.server.embedding.row_copy import copy_rows, take_rows
from shoal.server.embedding.spec import TableSpec
from shoal.server.embedding.table import RowTable
from shoal.server.rows.requests import Routed, route
from tests.server.embedding.in_numpy import deal_in_numpy, route_in_numpy


def as_lists(routed: Routed) -> tuple[list[int], list[int], list[int]]:
    return routed.ids.tolist(), routed.places.tolist(), routed.counts


def test_without_the_native_part_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "rows", None)
    with pytest.raises(BadInput, match="table 't' needs the native part of Shoal"):
        TableSpec("t", 40, 1)


def test_more_servers_than_the_native_part_deals_rows_to_are_refused() -> None:
    RowTable(TableSpec("t", 4000, 1), 0, 1024)
    with pytest.raises(BadInput, match="use 1024 at most"):
        RowTable(TableSpec("t", 4000, 1), 0, 1025)


@given(
    ids=st.lists(st.integers(0, 39), max_size=60),
    hot=st.sets(st.integers(0, 39)),
    servers=st.integers(1, 6),
    turn=st.integers(0, 100),
    placement=st.sampled_from(["hash", "range"]),
    is_large=st.booleans(),
    has_places=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_pull_is_routed_alike(
    ids: list[int],
    hot: set[int],
    servers: int,
    turn: int,
    placement: str,
    is_large: bool,
    has_places: bool,
) -> None:
    num_rows = 40 * MAX_DIRECT_ROWS if is_large else 40
    scale = num_rows // 40
    spec = TableSpec("t", num_rows, 1, placement=placement)  # type: ignore[arg-type]
    wanted = np.array(ids, np.int64) * scale
    known = IdMap(np.array(sorted(hot), np.int64) * scale, num_rows)
    places = np.arange(100, 100 + len(ids)) if has_places else None
    found = route(spec, wanted, places, servers, known, turn)
    assert as_lists(found) == as_lists(route_in_numpy(spec, wanted, places, servers, known, turn))


@pytest.mark.parametrize("wrong", [-1, 40, 2**62])
@pytest.mark.parametrize("placement", ["hash", "range"])
def test_an_id_that_is_no_row_is_refused(wrong: int, placement: str) -> None:
    spec = TableSpec("t", 40, 1, placement=placement)  # type: ignore[arg-type]
    known = IdMap(np.array([3]), 40)
    with pytest.raises(BadInput, match="has no row"):
        route(spec, np.array([3, wrong]), None, 4, known, 0)
    with pytest.raises(IndexError):
        Permutation(40, 1).deal(np.array([3, wrong]), 4)
    counts = IdCounts(40)
    with pytest.raises(IndexError):
        counts.add(np.array([3, wrong]))
    assert counts.size == 0 and counts.take()[0].tolist() == []


@given(size=st.integers(1, 500), shards=st.integers(1, 7), key=st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_rows_are_dealt_alike_and_each_slot_is_used_once(size: int, shards: int, key: int) -> None:
    shuffled = Permutation(size, key)
    owners, slots = shuffled.deal(np.arange(size), shards)
    assert sorted((slots * shards + owners).tolist()) == list(range(size))
    again = deal_in_numpy(size, key, np.arange(size), shards)
    assert (owners == again[0]).all() and (slots == again[1]).all()


def test_owners_of_a_large_table_are_those_of_numpy() -> None:
    spec = TableSpec("t", 2**62, 1)
    ids = torch.arange(1000) * (2**52 - 1)
    found = spec.locate(ids, 7)
    again = deal_in_numpy(2**62, key_of("owner", "t"), ids.numpy(), 7)
    assert (found[0] == again[0]).all() and (found[1] == again[1]).all()


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=8),
    st.sampled_from([31, 2 * MAX_DIRECT_ROWS, None]),
)
@settings(max_examples=40, deadline=None)
def test_ids_are_counted(batches: list[list[int]], num_rows: int | None) -> None:
    counts = IdCounts(num_rows)
    for batch in batches:
        memory = np.array(batch, np.int64)
        counts.add(memory)
        memory[:] = 7  # the caller uses it again
    exact = Counter(row for batch in batches for row in batch)
    assert counts.size == exact.total()
    ids, numbers = counts.take()
    assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == exact
    assert ids.tolist() == sorted(exact) and not len(counts.take()[0])


# ---- copies of rows ----------------------------------------------------------------------------

SOURCE = torch.arange(12.0).view(4, 3)


def test_rows_go_from_any_position_to_any_place() -> None:
    target = torch.zeros(3, 3)
    copy_rows(SOURCE, np.array([3, 1]), target, np.array([0, 2]))
    assert target.tolist() == [[9, 10, 11], [0, 0, 0], [3, 4, 5]]
    copy_rows(SOURCE[:2], None, target, None)
    assert torch.equal(target[:2], SOURCE[:2])


@pytest.mark.parametrize(("origins", "places"), [([4], [0]), ([-1], [0]), ([0], [3]), ([0], [-1])])
def test_a_position_that_is_out_of_range_copies_nothing(
    origins: list[int], places: list[int]
) -> None:
    target = torch.zeros(3, 3)
    with pytest.raises(IndexError):
        copy_rows(SOURCE, np.array([1, *origins]), target, np.array([1, *places]))
    index = np.array([1, 2, 3, 4], np.int32)
    assert not take_rows(
        index, 0, np.array(origins), SOURCE.numpy(), target.numpy(), np.array(places)
    )
    assert not target.any()


def test_rows_are_taken_by_an_index_of_positions() -> None:
    index = np.array([0, 3, 1, -2, 9], np.int32)  # of ids 10 to 14
    target = np.zeros((2, 3), np.float32)
    assert take_rows(index, 10, np.array([12, 11]), SOURCE.numpy(), target, None)
    assert target.tolist() == [[0, 1, 2], [6, 7, 8]]
    for without in (10, 13, 14, 9, 15, -(2**62)):
        assert not take_rows(index, 10, np.array([without]), SOURCE.numpy(), target, None)
