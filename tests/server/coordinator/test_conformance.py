"""One suite for both coordinators: at a socket, and an etcd cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from shoal.errors import BadInput
from shoal.server.coordinator import (
    MAX_VALUE_BYTES,
    Conflict,
    Coordinator,
    Lease,
    LeaseLost,
    Listing,
    Versioned,
)
from tests.server.coordinator.etcd_cluster import NEEDS_ETCD, etcd_cluster
from tests.server.coordinator.helpers import Connect, count, etcd_run, incremented, served, until

ETCD = pytest.param("etcd", marks=[pytest.mark.whole, NEEDS_ETCD])
Opened = AbstractContextManager[Connect]
TTL_S = 60.0


@pytest.fixture(scope="module", params=["service", ETCD])
def kind(request: pytest.FixtureRequest) -> Iterator[Callable[[], Opened]]:
    """What makes coordinators of one kind; an etcd cluster serves all tests."""
    if request.param != "etcd":
        yield served
        return
    with etcd_cluster() as cluster:
        cluster.leader()
        yield lambda: etcd_run(cluster.hosts)


@pytest.fixture
def connect(kind: Callable[[], Opened]) -> Iterator[Connect]:
    with kind() as found:
        yield found


@pytest.fixture
def coordinator(connect: Connect) -> Coordinator:
    return connect()


@pytest.mark.parametrize("value", [b"\x00\xff value", b""])
def test_a_value_is_read_back_with_its_version(coordinator: Coordinator, value: bytes) -> None:
    assert coordinator.get("chain/0") is None
    written = coordinator.put_if("chain/0", value, 0)
    assert written.version > 0
    assert coordinator.get("chain/0") == Versioned(value, written.version)


def test_another_version_is_a_conflict(
    coordinator: Coordinator,
) -> None:
    first = coordinator.put_if("chain/0", b"1", 0)
    second = coordinator.put_if("chain/0", b"2", first.version)
    for version in (0, first.version, second.version + 1):
        with pytest.raises(Conflict, match=f"chain/0 was changed .* version {second.version}"):
            coordinator.put_if("chain/0", b"3", version)
        with pytest.raises(Conflict):
            coordinator.delete_if("chain/0", version)
    assert coordinator.get("chain/0") == second


def test_a_version_of_a_key_that_does_not_exist_is_a_conflict(coordinator: Coordinator) -> None:
    for change in (
        lambda: coordinator.put_if("chain/0", b"", 5),
        lambda: coordinator.delete_if("chain/0", 5),
        lambda: coordinator.delete_if("chain/0", 0),
    ):
        with pytest.raises(Conflict, match="does not exist"):
            change()


def test_versions_grow_also_after_a_deletion(coordinator: Coordinator) -> None:
    first = coordinator.put_if("chain/0", b"1", 0)
    deleted = coordinator.delete_if("chain/0", first.version)
    assert coordinator.get("chain/0") is None
    second = coordinator.put_if("chain/0", b"1", 0)
    assert first.version < deleted < second.version


def test_one_of_many_that_race_wins_each_version(connect: Connect) -> None:
    """Threads increment a number by compare-and-set: none is lost, none counted twice.

    Two of them share a coordinator.
    """
    shared = connect()
    with ThreadPoolExecutor(4) as pool:
        done = [lambda made: len(made) == 10] * 4
        made = list(pool.map(incremented, [shared, shared, connect(), connect()], done))
    assert count(shared) == 40
    assert len({version for versions in made for version in versions}) == 40


def bound_to_a_short_lease(coordinator: Coordinator) -> tuple[Lease, Versioned]:
    """A key of a lease that ends soon, and has not ended before the key was written."""
    ttl_s = 0.05
    while True:
        lease = coordinator.grant(ttl_s, "server 1")
        try:
            return lease, coordinator.put_if("alive/1", b"a", 0, lease.id)
        except LeaseLost:  # this process got no core for so long
            ttl_s *= 4


def test_an_ended_lease_takes_its_keys_with_it(coordinator: Coordinator) -> None:
    lease, bound = bound_to_a_short_lease(coordinator)
    other = coordinator.grant(TTL_S, "server 2")
    assert bound.lease_id == lease.id
    coordinator.put_if("alive/2", b"b", 0, other.id)
    coordinator.put_if("chain/0", b"c", 0)
    until(lambda: list(coordinator.live("alive/")) == ["alive/2"], "the end of a lease")
    assert set(coordinator.list("").entries) == {"alive/2", "chain/0"}
    with pytest.raises(LeaseLost):
        coordinator.keep_alive(lease.id)
    with pytest.raises(LeaseLost):
        coordinator.put_if("alive/1", b"a", 0, lease.id)
    assert 0 < coordinator.keep_alive(other.id) <= TTL_S


def test_a_name_is_a_folder_or_one_key(coordinator: Coordinator) -> None:
    for key in ("chain/1", "chain/10", "chain", "chains/1"):
        coordinator.put_if(key, key.encode(), 0)
    assert list(coordinator.list("chain/").entries) == ["chain/1", "chain/10"]
    assert list(coordinator.list("chain/1").entries) == ["chain/1"]
    assert list(coordinator.list("").entries) == ["chain", "chain/1", "chain/10", "chains/1"]
    assert coordinator.list("none/").entries == {}


def test_a_watch_sees_a_key_that_is_written_changed_and_deleted(
    coordinator: Coordinator, connect: Connect
) -> None:
    watcher = connect()
    seen = watcher.watch("chain/", None)
    assert seen.entries == {}
    version = 0
    with ThreadPoolExecutor(1) as pool:
        for value in (b"1", b"2", None):
            waiting = pool.submit(watcher.watch, "chain/", seen, TTL_S)
            coordinator.put_if(f"alive/{version}", b"", 0)
            if value is None:
                coordinator.delete_if("chain/0", version)
            else:
                version = coordinator.put_if("chain/0", value, version).version
            seen = waiting.result()
            kept = {} if value is None else {"chain/0": Versioned(value, version)}
            assert seen.entries == kept


def test_a_watch_sees_the_end_of_a_lease(coordinator: Coordinator) -> None:
    _, bound = bound_to_a_short_lease(coordinator)
    assert coordinator.watch("alive/", Listing({"alive/1": bound}), TTL_S).entries == {}


def test_a_watch_without_changes_ends_with_what_was_seen(coordinator: Coordinator) -> None:
    coordinator.put_if("chain/0", b"", 0)
    seen = coordinator.list("chain/")
    assert coordinator.watch("chain/", seen, 0.01) == seen


def test_a_watch_does_not_delay_other_calls(coordinator: Coordinator) -> None:
    seen = coordinator.list("end")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(coordinator.watch, "end", seen, TTL_S)
        assert coordinator.get("end") is None
        coordinator.put_if("end", b"", 0)
        assert list(waiting.result().entries) == ["end"]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.put_if("", b"", 0),
        lambda c: c.put_if("k" * 600, b"", 0),
        lambda c: c.put_if("k", bytes(MAX_VALUE_BYTES + 1), 0),
        lambda c: c.put_if("k", b"", -1),
        lambda c: c.put_if("\ud800", b"", 0),
        lambda c: c.grant(0.0, "none"),
        lambda c: c.grant(float("nan"), "none"),
        lambda c: c.keep_alive(-1),
    ],
)
def test_what_no_coordinator_takes_is_refused(coordinator: Coordinator, call: object) -> None:
    assert callable(call)
    with pytest.raises(BadInput, match="a coordinator does not take"):
        call(coordinator)
    assert coordinator.list("").entries == {}
