"""Hosts of an elastic run that are lost, and workers that notice it first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shoal.launch.hosts.remote import LostHosts


def test_where_a_worker_gave_up_the_launcher_waits_until_it_notices_that_its_host_is_cut_off() -> (
    None
):
    lost = LostHosts()
    lost.note_exit(2, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lost.has_host_of, 2, "h2")
        lost.add("h2")
        assert waiting.result(timeout=30)
    assert lost.names == {"h2"}


def test_the_end_of_the_run_ends_this_wait() -> None:
    lost = LostHosts()
    lost.note_exit(2, 1)
    lost.end()
    assert not lost.has_host_of(2, "h2")


def test_a_killed_worker_comes_back_on_its_host_at_once() -> None:
    lost = LostHosts()
    lost.note_exit(2, 1)
    lost.note_exit(2, -9)
    assert not lost.has_host_of(2, "h2")
