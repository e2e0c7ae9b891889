"""The pure store: what it decides, what it applies, and what of it survives on disk."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.server.coordinator import (
    Alive,
    Answer,
    CoordinatorError,
    DeleteIf,
    Failed,
    Grant,
    Lease,
    LeaseLost,
    List,
    Mutation,
    PutIf,
    Unavailable,
    alive_key,
    forget,
)
from shoal.server.coordinator import store as store_module
from shoal.server.coordinator.service import LONGEST_TICK_S, Core, LeaseClock
from shoal.server.coordinator.store import RequestId, Store
from tests.server.coordinator.helpers import LocalCoordinator

KEYS = st.sampled_from(["a", "chain/0", "chain/1", "alive/1"])
LEASES = st.integers(1, 4)
REQUESTS = st.one_of(
    st.builds(Grant, st.sampled_from([0.5, 2.0]), st.just("holder")),
    st.builds(PutIf, KEYS, st.binary(max_size=3), st.integers(0, 6), st.none() | LEASES),
    st.builds(DeleteIf, KEYS, st.integers(0, 6)),
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def read_back(store: Store) -> Store:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(store), type=Store)


@given(st.lists(REQUESTS, max_size=40), st.integers(0, 40))
def test_a_store_that_is_read_back_goes_on_alike(steps: list[Mutation], read_at: int) -> None:
    """Every revision is greater than the one before it, also across the restart."""
    store = restored = Store()
    for number, request in enumerate(steps):
        if number == read_at:
            restored = read_back(store)
        if isinstance(request, PutIf | DeleteIf) and request.version:  # the right one, most often
            current = store.list(request.key).entries.get(request.key)
            right = 0 if current is None else current.version
            request = msgspec.structs.replace(request, version=right)
        before, by = read_back(store), RequestId(7, number)
        try:
            changed, outcome = store.after(request, by)
        except CoordinatorError:
            assert store == before
            continue
        assert store == before
        restored, same = restored.after(request, by)
        assert changed == restored and outcome == same == changed.outcome(by)
        assert changed.revision == before.revision + (not isinstance(request, Grant))
        store = changed


def test_a_lease_that_ends_takes_the_keys_with_it_that_are_bound_to_it_now() -> None:
    store, lease = Store().after(Grant(1.0, "x"))
    assert isinstance(lease, Lease)
    for key in ("a", "b"):
        store, _ = store.after(PutIf(key, b"", 0, lease.id))
    store, _ = store.after(PutIf("b", b"2", 2))
    ended = store.without({lease.id})
    assert list(ended.entries) == ["b"] and not ended.leases
    assert ended.revision == store.revision + 1


def test_leases_end_by_the_time_that_is_given() -> None:
    clock = Clock()
    coordinator = LocalCoordinator(clock)
    lease = coordinator.grant(0.5, "server 1")
    coordinator.put_if("alive/1", b"", 0, lease.id)
    clock.now_s = 0.4
    assert coordinator.keep_alive(lease.id) == 0.5
    clock.now_s = 0.8
    assert list(coordinator.live("alive/")) == ["alive/1"]
    clock.now_s = 0.9
    with pytest.raises(LeaseLost, match=f"lease {lease.id} has ended"):
        coordinator.keep_alive(lease.id)
    assert coordinator.live("alive/") == {}


def test_the_clock_of_leases_stands_still_while_the_coordinator_does() -> None:
    real = Clock()
    clock = LeaseClock(real)
    real.now_s = 0.05
    assert clock.now_s() == pytest.approx(0.05)
    real.now_s = 3600.0
    assert clock.now_s() == pytest.approx(0.05 + LONGEST_TICK_S)
    real.now_s = 3599.0
    assert clock.now_s() == pytest.approx(0.05 + LONGEST_TICK_S)


def failed(answer: Answer) -> str:
    assert isinstance(answer, Failed)
    return answer.error


def test_a_request_that_is_sent_again_gets_the_same_answer() -> None:
    core = Core()
    request = PutIf("a", b"1", 0)
    first = core.answer(request, RequestId(1, 5, 0))
    assert isinstance(first, int)
    assert core.answer(request, RequestId(1, 5, 1)) == first
    assert failed(core.answer(request, RequestId(2, 5, 0))) == "Conflict"  # of another client
    granted = core.answer(Grant(1.0, "x"), RequestId(1, 6, 0))
    assert core.answer(Grant(1.0, "x"), RequestId(1, 6, 1)) == granted
    deleted = core.answer(DeleteIf("a", first), RequestId(1, 7, 0))
    assert isinstance(deleted, int)
    assert core.answer(DeleteIf("a", first), RequestId(1, 7, 1)) == deleted


def test_a_request_that_arrives_after_its_client_has_gone_on_changes_nothing() -> None:
    core = Core()
    core.answer(List("a"), RequestId(1, 6, 0))
    assert failed(core.answer(PutIf("a", b"late", 0), RequestId(1, 5, 0))) == "Unavailable"
    assert failed(core.answer(PutIf("a", b"", 9), RequestId(1, 7, 1))) == "Conflict"
    assert failed(core.answer(PutIf("a", b"late", 0), RequestId(1, 7, 0))) == "Unavailable"


def test_a_store_holds_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_KEYS", 2)
    monkeypatch.setattr(store_module, "MAX_LEASES", 1)
    monkeypatch.setattr(store_module, "MAX_STATE_BYTES", 20)
    coordinator = LocalCoordinator()
    entry = coordinator.put_if("a", bytes(5), 0)
    coordinator.grant(1.0, "x")
    for call in (
        lambda: coordinator.grant(1.0, "x"),
        lambda: coordinator.put_if("b", bytes(20), 0),
        lambda: coordinator.put_if("a", bytes(20), entry.version),
    ):
        with pytest.raises(Unavailable, match="and no more"):
            call()
    coordinator.put_if("b", b"", 0)
    with pytest.raises(Unavailable, match="2 keys, and no more"):
        coordinator.put_if("c", b"", 0)
    assert coordinator.get("a") == entry
    coordinator.put_if("a", b"", entry.version)


def test_the_key_of_a_process_that_has_exited_is_deleted() -> None:
    coordinator = LocalCoordinator()
    lease = coordinator.grant(60.0, "server 1")
    value = msgspec.msgpack.encode(Alive(3, "unix:/here", 1234))
    coordinator.put_if(alive_key(1), value, 0, lease.id)
    coordinator.put_if(alive_key(2), b"\xc1", 0, lease.id)  # not of the form of such a key
    assert not forget(coordinator, 2, 1234)
    assert not forget(coordinator, 1, 1235)  # another process has taken its place
    assert list(coordinator.live("alive/")) == ["alive/1", "alive/2"]
    assert forget(coordinator, 1, 1234)
    assert not forget(coordinator, 1, 1234)
    assert list(coordinator.live("alive/")) == ["alive/2"]


def test_a_key_is_bound_to_the_lease_of_its_latest_value() -> None:
    clock = Clock()
    coordinator = LocalCoordinator(clock)
    first, second = coordinator.grant(1.0, "first"), coordinator.grant(2.0, "second")
    one = coordinator.put_if("a", b"1", 0, first.id)
    two = coordinator.put_if("a", b"2", one.version, second.id)
    coordinator.put_if("b", b"1", 0, first.id)
    clock.now_s = 1.5
    assert coordinator.get("a") == two
    assert coordinator.get("b") is None
    coordinator.put_if("a", b"3", two.version)
    assert coordinator.live("a") == {}
    clock.now_s = 2.5
    found = coordinator.get("a")
    assert found is not None and found.value == b"3"
