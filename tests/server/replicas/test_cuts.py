"""Cuts between hosts, in both directions and in one: nothing is lost, nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.replicas.hosts import HostWorld, Pusher, hosts_world

pytestmark = pytest.mark.whole
Cut = Callable[[HostWorld], object]


def between(made: HostWorld, member: int, hears: bool, is_heard: bool) -> None:
    """Cut one member from all others, in one direction or in both."""
    here = made.config.members[member]
    for other in range(len(made.net.hosts)):
        if other != here and not hears:
            made.net.cut(other, here)
        if other != here and not is_heard:
            made.net.cut(here, other)


CUTS: dict[str, Cut] = {
    "head from middle": lambda m: m.net.cut_both(*m.config.members[:2]),
    "middle is not heard by tail": lambda m: m.net.cut(*m.config.members[1:]),
    "head from the others": lambda m: [
        m.net.cut_both(m.config.members[0], other) for other in m.config.members[1:]
    ],
    "head alone": lambda m: m.net.isolate(m.config.members[0]),
    "middle alone": lambda m: m.net.isolate(m.config.members[1]),
    "tail alone": lambda m: m.net.isolate(m.config.members[2]),
    "head from coordinator": lambda m: m.net.cut_both(m.config.members[0], m.of_coordinator),
    "head is not heard by coordinator": lambda m: m.net.cut(m.config.members[0], m.of_coordinator),
    "head does not hear coordinator": lambda m: m.net.cut(m.of_coordinator, m.config.members[0]),
    "head is not heard": lambda m: between(m, 0, hears=True, is_heard=False),
    "head does not hear": lambda m: between(m, 0, hears=False, is_heard=True),
    "tail is not heard": lambda m: between(m, 2, hears=True, is_heard=False),
}


@pytest.mark.parametrize("cut", CUTS)
def test_pushes_go_on_beside_a_cut_and_all_copies_agree_after_it(cut: str) -> None:
    with hosts_world() as made:
        pusher = Pusher(made)
        pusher.wait_more()
        epoch = made.config.epoch
        CUTS[cut](made)
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
