"""A server that has exited is forgotten by its own key alone."""

from __future__ import annotations

import msgspec

from shoal.coordinator.alive import Alive, alive_key, forget
from tests.coordinator.local import LocalCoordinator


def test_the_key_of_a_process_that_has_exited_is_deleted() -> None:
    coordinator = LocalCoordinator()
    lease = coordinator.grant(60.0, "server 1")
    value = msgspec.msgpack.encode(Alive(3, "unix:/here", 1234))
    coordinator.put_if(alive_key(1), value, 0, lease.id)
    assert not forget(coordinator, 2, 1234)
    assert not forget(coordinator, 1, 1235)  # another process has taken its place
    assert list(coordinator.live("alive/")) == ["alive/1"]
    assert forget(coordinator, 1, 1234)
    assert not forget(coordinator, 1, 1234)
    assert coordinator.list("").entries == {}


def test_a_key_of_no_form_stays() -> None:
    coordinator = LocalCoordinator()
    coordinator.put_if(alive_key(1), b"\xc1", 0)
    coordinator.put_if(alive_key(2), msgspec.msgpack.encode(Alive(3)), 0)
    assert not forget(coordinator, 1, 1234)
    assert not forget(coordinator, 2, 0)
    assert len(coordinator.list("").entries) == 2
