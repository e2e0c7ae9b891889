"""Hot rows: who is asked, what is copied, how old a copy or a kept row may be."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.transport.shm import memfd
from shoal.server.embedding.hashing import Ids
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.embedding.table import RowTable
from shoal.server.model.hot_table import HotTable
from shoal.server.protocol import Refused
from shoal.server.rows.client import RowCache
from shoal.server.rows.memory import RowMemories, attach
from shoal.server.rows.requests import hottest_rows
from tests.server.embedding.in_numpy import fill, spread

SGD = RowOptimizer("sgd", 1.0)
SPEC = TableSpec("t", 40, 2, "zeros", optimizer=SGD, placement="range", hot_share=0.1)


@given(loads=st.lists(st.integers(0, 50), min_size=1, max_size=6), amount=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_portions_make_loads_as_even_as_they_can_be(loads: list[int], amount: int) -> None:
    portions = fill(np.array(loads, np.int64), amount)
    filled = [load + portion for load, portion in zip(loads, portions.tolist(), strict=True)]
    assert portions.sum() == amount and portions.min() >= 0
    given_to = [total for total, portion in zip(filled, portions, strict=True) if portion]
    assert max(given_to, default=0) <= min(filled) + 1


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    turn=st.integers(0, 9),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_only_hot_rows_are_asked_elsewhere(
    owners: list[int], turn: int, data: st.DataObject
) -> None:
    size = len(owners)
    is_hot = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    targets = spread(np.array(owners), is_hot, 4, turn)
    assert (targets[~is_hot] == np.array(owners)[~is_hot]).all()
    assert ((targets >= 0) & (targets < 4)).all()


def test_a_hot_row_is_asked_of_all_servers_in_turn() -> None:
    targets = {int(spread(np.zeros(1, np.int64), np.ones(1, bool), 1, t)[0]) for t in range(4)}
    assert targets == {0}
    several = [spread(np.zeros(8, np.int64), np.ones(8, bool), 4, turn) for turn in range(8)]
    assert {int(targets[0]) for targets in several} == {0, 1, 2, 3}


def test_the_hottest_rows_are_those_over_the_share_and_stay_over_half_of_it() -> None:
    ids = np.array([1, 2, 3, 1])
    counts = np.array([6, 5, 4, 6])
    assert hottest_rows(ids, counts, 10.0, 9, np.zeros(0, np.int64)).tolist() == [1]
    assert hottest_rows(ids, counts, 4.5, 9, np.array([3])).tolist() == [1, 2, 3]
    assert hottest_rows(ids, counts, 0.0, 2, np.zeros(0, np.int64)).tolist() == [1, 2]


def test_a_set_stays_while_a_new_one_would_hardly_serve_more_pulls() -> None:
    ids = np.arange(8)
    counts = np.array([500, 300, 150, 40, 10, 9, 8, 7])
    assert hottest_rows(ids, counts, 35.0, 9, np.array([0, 1, 2])).tolist() == [0, 1, 2, 3]
    assert hottest_rows(ids, counts, 9.5, 9, np.arange(4)).tolist() == [0, 1, 2, 3]  # 99% of them
    assert hottest_rows(ids, counts, 35.0, 9, np.arange(8)).tolist() == [0, 1, 2, 3]  # too many


# ------------------------------------------------------------------------------ copies


def pair() -> tuple[HotTable, HotTable]:
    """The owner of rows 0 to 19, and the other server, with rows 1, 3 and 30 as hot ones."""
    owner, reader = (HotTable(RowTable(SPEC, shard, 2)) for shard in range(2))
    for hot in (owner, reader):
        hot.choose(2, np.array([1, 3, 30]), publish=True)
    return owner, reader


def read(reader: HotTable, ids: Tensor, version: int) -> Tensor:
    """Copies that are all there."""
    found = reader.look(ids.numpy(), version)
    assert found.is_fresh.all()
    rows = torch.empty(len(ids), 2)
    reader.read(found, rows.numpy())
    return rows


def test_a_copy_is_used_for_versions_that_it_has_reached() -> None:
    owner, reader = pair()
    ids = torch.tensor([1, 3])
    assert not reader.look(ids.numpy(), 0).is_settled
    owner.table.push(torch.tensor([3]), torch.ones(1, 2))
    first = owner.changes((0, 0), version=1)
    assert first.ids.tolist() == [1, 3]
    reader.install(0, first)
    assert torch.equal(read(reader, ids, 1), owner.table.pull(ids))
    assert (
        not reader.look(ids.numpy(), 2).is_fresh.any()
        and not reader.look(ids.numpy(), 2).is_settled
    )
    assert reader.look(np.array([7]), 2).is_settled, "no copy of it will come"
    owner.table.push(torch.tensor([3]), torch.ones(1, 2))
    later = owner.changes((2, 1), version=2)
    assert later.ids.tolist() == [3], "only what has changed is sent"
    reader.install(0, later)
    assert torch.equal(read(reader, ids, 2), owner.table.pull(ids))


def test_copies_end_with_their_owner_and_with_the_rows_of_the_table() -> None:
    owner, reader = pair()
    reader.install(0, owner.changes((0, 0), version=4))
    assert reader.look(np.array([1]), 4).is_fresh.all()
    reader.lose(0)
    assert not reader.look(np.array([1]), 0).is_fresh.any()
    reader.install(0, owner.changes((0, 0), version=4))
    reader.clear()
    reader.install(0, owner.changes((0, 0), version=4))
    assert not reader.look(np.array([1]), 0).is_fresh.any(), "of a set that is no more"


def test_rows_that_stay_hot_keep_their_copies_and_an_older_set_has_no_effect() -> None:
    owner, reader = pair()
    reader.install(0, owner.changes((0, 0), version=4))
    reader.choose(3, np.array([2, 3]), publish=False)
    assert reader.look(np.array([2, 3]), 4).is_fresh.tolist() == [False, True]
    reader.choose(2, np.array([5]), publish=True)
    assert reader.ids.tolist() == [2, 3] and not reader.is_published


@pytest.mark.parametrize("ids", [[3, 3], [5, 1], [40], [-1]])
def test_a_bad_set_of_hot_rows_is_refused(ids: list[int]) -> None:
    hot = HotTable(RowTable(SPEC, 0, 2))
    with pytest.raises(Exception, match=r"hot rows|has no row"):
        hot.choose(1, np.array(ids), publish=True)
    assert hot.number == 0 and not len(hot.ids)


def test_rows_that_a_server_does_not_own_are_refused() -> None:
    owner, reader = pair()
    changes = owner.changes((0, 0), version=1)
    with pytest.raises(Refused, match="that are not its hot rows"):
        reader.install(1, changes)
    with pytest.raises(Refused, match="that are not its hot rows"):
        reader.install(0, changes._replace(ids=changes.ids + 1))


def test_loads_are_counted_by_owner_and_as_they_were_served() -> None:
    _, reader = pair()
    reader.note(np.array([30, 31]))
    reader.install(0, pair()[0].changes((0, 0), version=1))
    reader.note(np.array([1, 3, 30]), copies=2)
    report = reader.report()
    assert report["served"] == 5 and report["by_owner"] == [2, 3]
    assert report["ids"][0] == 30 and report["counts"][0] == 2


@given(
    owned=st.lists(st.integers(0, 45), max_size=12),
    copied=st.lists(st.integers(0, 45), max_size=12),
    version=st.integers(0, 3),
    has_places=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_one_native_call_serves_what_is_found_row_by_row(
    owned: list[int], copied: list[int], version: int, has_places: bool
) -> None:
    """Or it serves nothing: a row that is not here, not used yet, or not new enough."""
    owner, reader = pair()
    used = [20, 25, 30, 39]
    owner.table.push(torch.tensor([1, 3]), torch.ones(2, 2))
    reader.table.push(torch.tensor(used), torch.ones(4, 2))
    reader.install(0, owner.changes((0, 0), version=2))
    ids = np.array(copied + owned, np.int64)
    places = np.arange(len(ids))[::-1].copy() if has_places else None
    target = np.zeros((len(ids), 2), np.float32)
    is_served = reader.serve(ids, len(copied), version, target, places)
    is_here = set(owned) <= set(used) and set(copied) <= {1, 3}
    assert is_served == (is_here and (version <= 2 or not copied))
    if not is_served:
        assert not target.any() and reader.report()["served"] == 0
        return
    rows = torch.cat(
        [
            owner.table.pull(torch.tensor(copied, dtype=torch.int64)),
            reader.table.pull(torch.tensor(owned, dtype=torch.int64)),
        ]
    )
    assert torch.equal(
        torch.from_numpy(target).flip(0) if has_places else torch.from_numpy(target), rows
    )
    report = reader.report()
    assert report["by_owner"] == [len(copied), len(owned)] and report["served"] == len(ids)
    exact = Counter(copied + owned)
    assert dict(zip(report["ids"], report["counts"], strict=True)) == exact


# ------------------------------------------------------------------------------ kept rows


@given(
    st.lists(st.lists(st.integers(0, 9), unique=True), max_size=12),
    st.integers(1, 4),
    st.sampled_from([10, 1 << 23]),  # an entry for every row, and for hashes of them
)
@settings(max_examples=40, deadline=None)
def test_a_kept_row_is_never_older_than_its_bound(
    pulls: list[list[int]], steps: int, num_rows: int
) -> None:
    """The row of each id tells the id, and the step at which it was pulled."""
    cache = RowCache(steps, num_rows)
    asked = 0
    for step, small in enumerate(pulls):
        wanted = [id * (num_rows // 10) for id in small]
        rows = torch.empty(len(wanted), 2)

        def fetch(places: Ids, step: int = step, rows: Tensor = rows) -> Callable[[], None]:
            nonlocal asked
            asked += len(places)

            def wait() -> None:
                for place in places.tolist():
                    rows[place] = torch.tensor([float(wanted[place]), float(step)])  # noqa: B023

            return wait

        cache.pull(np.array(wanted, np.int64), step, rows, fetch)
        assert rows[:, 0].tolist() == wanted
        assert ((step - rows[:, 1] >= 0) & (step - rows[:, 1] <= steps)).all()
    assert cache.asked == sum(map(len, pulls)) and cache.asked - cache.hits == asked


def test_kept_rows_are_found_after_old_ones_were_left_out() -> None:
    """Ten steps of ids of which half are new ones: memory stays bounded."""
    cache = RowCache(2, 1000)
    for step in range(100):
        ids = np.arange(4 * step, 4 * step + 8)
        rows = torch.zeros(8, 1)

        def fetch(places: Ids, ids: Ids = ids, rows: Tensor = rows) -> Callable[[], None]:
            rows[places] = torch.from_numpy(ids[places]).float().view(-1, 1)
            return lambda: None

        cache.pull(ids, step, rows, fetch)
        assert torch.equal(rows.flatten(), torch.from_numpy(ids).float())
    assert cache.hits == 99 * 4 and cache.capacity < 64


def test_memory_is_used_again_once_no_tensor_refers_to_it() -> None:
    shared: list[int] = []
    memories = RowMemories(lambda number, descriptor: shared.append(number))
    with memories.take(4, 2) as first:
        kept = first.rows[1:2]
    with memories.take(4, 2) as second:
        pass
    assert (first.memory, second.memory) == (0, 1) and shared == [0, 1]
    del first, second
    with memories.take(4, 2) as third:
        assert third.memory == 1, "a slice still refers to the first"
    del kept, third
    with memories.take(4, 2) as fourth:
        assert fourth.memory == 0 and shared == [0, 1]


def test_rows_are_private_while_all_memory_is_in_use_or_servers_are_elsewhere() -> None:
    memories = RowMemories(lambda number, descriptor: None)
    taken = []
    for _ in range(9):
        with memories.take(4, 2) as pulled:
            taken.append(pulled)
    assert [pulled.memory for pulled in taken] == [*range(8), None]
    memories = RowMemories(None)
    with memories.take(4, 2) as pulled:
        assert pulled.memory is None and pulled.rows.shape == (4, 2)
    address = pulled.rows.data_ptr()
    with memories.take(4, 2) as other:
        assert other.rows.data_ptr() != address
    del pulled
    with memories.take(3, 2) as again:
        assert again.rows.data_ptr() == address


def test_memory_of_a_pull_that_failed_is_not_used_again() -> None:
    memories = RowMemories(lambda number, descriptor: None)
    with pytest.raises(ZeroDivisionError), memories.take(4, 2):
        raise ZeroDivisionError
    with memories.take(4, 2) as pulled:
        assert pulled.memory == 1


def test_a_larger_pull_gets_larger_memory_that_servers_see() -> None:
    seen: dict[int, torch.Tensor] = {}

    def share(number: int, descriptor: int) -> None:
        seen[number] = torch.from_numpy(attach(descriptor))

    memories = RowMemories(share)
    with memories.take(4, 2):
        pass
    with memories.take(1 << 18, 2) as pulled:
        assert pulled.memory is not None
        seen[pulled.memory][3] = 7.0
    assert pulled.rows[1, 1] == 7.0


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(Refused, match="sealed"):
        attach(descriptor)
    os.close(descriptor)
    descriptor = memfd.make("odd", 100)
    with pytest.raises(Refused, match="sealed"):
        attach(descriptor)
    os.close(descriptor)
