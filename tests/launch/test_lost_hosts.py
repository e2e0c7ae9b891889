"""Hosts of an elastic run that are lost, and workers that notice it first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.launch.hosts import agent
from shoal.launch.hosts.agent import LauncherUnreachable, Presence
from shoal.launch.hosts.remote_workers import LostHosts


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


def test_an_agent_that_does_not_reach_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_CONNECT_S", 0.01)
    shown = Presence(("127.0.0.1", 1), b"s" * 32, "2.1", lambda: None)
    with pytest.raises(LauncherUnreachable, match=r"did not reach the launcher at 127.0.0.1:1"):
        shown.__enter__()
