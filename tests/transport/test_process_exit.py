from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.transport.shm.process_exit import describe_status, exit_status

KERNEL = tuple(int(word) for word in os.uname().release.split("-")[0].split(".")[:2])
WAYS = [
    (lambda: os._exit(0), 0, "exit status 0"),
    (lambda: os._exit(3), 3, "exit status 3"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "killed by signal 9 (SIGKILL)"),
    (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), -35, "killed by signal 35"),
]


@contextmanager
def process(body: object) -> Iterator[tuple[int, int]]:
    """A child that runs `body`: its pid and a pidfd. It is killed at the end and waited for."""
    pid = os.fork()
    if pid == 0:
        body()  # type: ignore[operator]
        os._exit(99)
    pidfd = os.pidfd_open(pid)
    try:
        yield pid, pidfd
    finally:
        os.close(pidfd)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except ProcessLookupError:
            pass


@pytest.mark.parametrize(("way", "status", "sentence"), WAYS)
@pytest.mark.parametrize("reaped", [False, True])
def test_how_a_process_ended(way: object, status: int, sentence: str, reaped: bool) -> None:
    if reaped and KERNEL < (6, 15):
        pytest.skip("before Linux 6.15 it is lost once the parent has waited")
    with process(way) as (pid, pidfd):
        if reaped:
            os.waitpid(pid, 0)
        assert exit_status(pidfd) == status
    assert describe_status(status) == sentence


def test_a_process_that_runs_has_no_exit_status() -> None:
    with process(signal.pause) as (_, pidfd):
        assert exit_status(pidfd, patience_s=0.05) is None


def test_a_process_that_cannot_be_held_has_an_unknown_status() -> None:
    assert describe_status(exit_status(-1)) == "exit status unknown"
