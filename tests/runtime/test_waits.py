"""A wait that takes long is said, again and again; with a limit it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from shoal.comm.group import Group
from shoal.comm.transport.shm.segment import is_built
from shoal.runtime.config import WaitConfig
from shoal.runtime.waits import LongWait, Watcher, add_source, process_in_words, waiting
from tests.comm.threads import on_shm_threads

AT_ONCE = WaitConfig(notice_s=1e-9, repeat_s=1e-9)
ONCE = WaitConfig(notice_s=1e-9, repeat_s=1e6)
LATER = WaitConfig(notice_s=1e6)


def watcher(config: WaitConfig, lines: list[str]) -> Watcher:
    return Watcher(config, lines.append)


def test_a_line_says_who_waits_for_whom_in_what_since_when() -> None:
    lines: list[str] = []
    with waiting("rank 0", "server 1", "PULL"):
        watcher(AT_ONCE, lines).look()
    assert lines[0].startswith("rank 0 has waited for server 1 in PULL for 0 s, since ")


def test_a_wait_is_said_again_after_a_while_and_not_before() -> None:
    often: list[str] = []
    rarely: list[str] = []
    never: list[str] = []
    found = [watcher(AT_ONCE, often), watcher(ONCE, rarely), watcher(LATER, never)]
    with waiting("rank 0", lambda: "rank 1", "send"):
        for each in found * 3:
            each.look()
    found[0].look()  # it has ended
    assert (len(often), len(rarely), len(never)) == (3, 1, 0)


def test_a_source_is_asked_for_as_long_as_it_exists() -> None:
    class Source:
        def current_wait(self) -> LongWait:
            return LongWait("rank 3", "rank 4", "barrier", time.monotonic_ns())

    lines: list[str] = []
    source = Source()
    add_source(source.current_wait)
    each = watcher(ONCE, lines)
    each.look()
    del source
    each.look()
    assert [line.split(" for 0 s")[0] for line in lines] == [
        "rank 3 has waited for rank 4 in barrier"
    ]


def test_a_wait_beyond_the_limit_is_given_up_once() -> None:
    gave_up: list[float] = []
    within = WaitConfig(limit_s=1e6)
    beyond = watcher(WaitConfig(limit_s=1e-9), [])
    with waiting("rank 0", "rank 1", "send", gave_up.append):
        watcher(within, []).look()
        assert gave_up == []
        beyond.look()
        beyond.look()
    assert len(gave_up) == 1


def test_the_thread_looks_by_itself() -> None:
    said = threading.Event()
    with (
        Watcher(WaitConfig(notice_s=0.01, repeat_s=0.01), lambda line: said.set()),
        waiting("rank 0", "rank 1", "send"),
    ):
        assert said.wait(60)


def test_a_stopped_process_is_called_so() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert process_in_words(process.pid) == f"process {process.pid} is stopped"
    process.kill()
    process.communicate()


@pytest.mark.skipif(not is_built(), reason="built without a compiler")
def test_a_collective_names_the_ranks_that_have_not_come_to_it() -> None:
    come = threading.Event()
    lines: list[str] = []

    def body(group: Group) -> None:
        if group.rank == 1:
            each = watcher(AT_ONCE, lines)
            while len(lines) < 2:  # ranks 0 and 2 sleep
                lines.clear()
                each.look()
            come.set()
        group.all_reduce(torch.ones(3)).wait()

    on_shm_threads(3, body)
    assert come.is_set()
    whom = f"rank 1 (process {os.getpid()})"
    assert sorted(line.split(" for 0 s")[0] for line in lines) == [
        f"rank {rank} has waited for {whom} in all_reduce #1 of 3 float32 sum" for rank in (0, 2)
    ]


@pytest.mark.skipif(not is_built(), reason="built without a compiler")
def test_a_receive_names_the_rank_that_has_not_sent() -> None:
    lines: list[str] = []

    def body(group: Group) -> None:
        if group.rank == 0:
            group.recv(torch.empty(1), 1, 5).wait()
            return
        each = watcher(AT_ONCE, lines)
        while not lines:
            each.look()
        group.send(torch.ones(1), 0, 5).wait()

    on_shm_threads(2, body)
    assert lines[0].startswith(f"rank 0 has waited for rank 1 (process {os.getpid()}) in recv from")
