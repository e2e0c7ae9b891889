"""Cuts between hosts, in both directions and in one: nothing is lost, nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.errors import PeerLost
from tests.server.replicas.hosts import HostWorld, Pusher, hosts_world

pytestmark = pytest.mark.whole
Cut = Callable[[HostWorld], None]


def head_alone(made: HostWorld) -> None:
    made.net.isolate(made.config.members[0])


def middle_alone(made: HostWorld) -> None:
    made.net.isolate(made.config.members[1])


def tail_alone(made: HostWorld) -> None:
    made.net.isolate(made.config.members[2])


def head_from_coordinator(made: HostWorld) -> None:
    made.net.cut_both(made.config.members[0], made.of_coordinator)


def head_is_not_heard_by_coordinator(made: HostWorld) -> None:
    made.net.cut(made.config.members[0], made.of_coordinator)


def head_does_not_hear_coordinator(made: HostWorld) -> None:
    made.net.cut(made.of_coordinator, made.config.members[0])


def head_is_not_heard(made: HostWorld) -> None:
    for other in range(len(made.net.hosts)):
        if other != made.config.members[0]:
            made.net.cut(made.config.members[0], other)


def head_does_not_hear(made: HostWorld) -> None:
    for other in range(len(made.net.hosts)):
        if other != made.config.members[0]:
            made.net.cut(other, made.config.members[0])


def tail_is_not_heard(made: HostWorld) -> None:
    for other in range(len(made.net.hosts)):
        if other != made.config.members[2]:
            made.net.cut(made.config.members[2], other)


def head_from_middle(made: HostWorld) -> None:
    """All of them reach the coordinator."""
    made.net.cut_both(*made.config.members[:2])


def middle_is_not_heard_by_tail(made: HostWorld) -> None:
    made.net.cut(*made.config.members[1:])


def head_from_the_others(made: HostWorld) -> None:
    head, *others = made.config.members
    for other in others:
        made.net.cut_both(head, other)


CUTS = [
    head_from_middle,
    middle_is_not_heard_by_tail,
    head_from_the_others,
    head_alone,
    middle_alone,
    tail_alone,
    head_from_coordinator,
    head_is_not_heard_by_coordinator,
    head_does_not_hear_coordinator,
    head_is_not_heard,
    head_does_not_hear,
    tail_is_not_heard,
]


@pytest.mark.parametrize("cut", CUTS)
def test_pushes_go_on_beside_a_cut_and_all_copies_agree_after_it(cut: Cut) -> None:
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        epoch = made.config.epoch
        cut(made)
        pusher.wait(lambda: made.config.epoch > epoch)
        pusher.wait_more()
        made.net.heal()
        pusher.wait(lambda: len(made.config.members) == 3)
        pusher.wait_more()
        assert pusher.stop()[: len(pusher.counts)] == [-float(n) for n in pusher.counts]
        assert made.one_head_an_epoch()
        assert made.copies_are_equal()


def test_a_worker_that_is_cut_off_with_the_head_goes_on_after_the_cut() -> None:
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        before = made.config
        head = made.config.members[0]
        for here in (head, made.of_worker):
            for there in (*made.config.members[1:], made.of_coordinator):
                made.net.cut_both(here, there)
        made.wait(lambda: made.config.epoch > before.epoch)
        assert head not in made.config.members
        made.net.heal()
        pusher.wait_more()
        pusher.wait(lambda: len(made.config.members) == 3)
        assert pusher.stop()[: len(pusher.counts)] == [-float(n) for n in pusher.counts]
        assert made.one_head_an_epoch()
        assert made.copies_are_equal()


def test_a_worker_that_reaches_no_replica_gets_an_error_that_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocol.endpoint.SILENT_PEER_MS", 1500)
    monkeypatch.setattr("shoal.server.client.chain_route.FIND_HEAD_S", 1.0)
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        made.net.isolate(made.of_worker)
        with pytest.raises(PeerLost, match=r"shard 0 \(servers 0 to 2\)"):
            pusher.wait_more(1000)
        assert made.config.members == (0, 1, 2)
        assert made.copies_are_equal()
