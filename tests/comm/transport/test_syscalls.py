"""Shared memory where the operating system is not as expected: calls, descriptors, signals."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import shoal
from shoal.comm.transport.shm import memfd
from shoal.comm.transport.shm.process_exit import (
    close_pidfds,
    describe_status,
    exit_status,
    has_ended,
    open_pidfds,
)
from shoal.comm.transport.shm.segment import is_built, join

KERNEL = tuple(int(word) for word in os.uname().release.split("-")[0].split(".")[:2])
WAYS = [
    (lambda: os._exit(0), 0, "exit status 0"),
    (lambda: os._exit(3), 3, "exit status 3"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "killed by signal 9 (SIGKILL)"),
    (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), -35, "killed by signal 35"),
]
CALLS = [(os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")]


@contextmanager
def process(body: Callable[[], object]) -> Iterator[int]:
    """A child that runs `body`. It is killed at the end, and waited for."""
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(99)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("way", "status", "sentence"), WAYS)
@pytest.mark.parametrize("reaped", [False, True])
def test_how_a_process_ended(
    way: Callable[[], object], status: int, sentence: str, reaped: bool
) -> None:
    if reaped and KERNEL < (6, 15):
        pytest.skip("before Linux 6.15 it is lost once the parent has waited")
    with process(way) as pid:
        (pidfd,) = open_pidfds([pid])
        if reaped:
            os.waitpid(pid, 0)
        assert exit_status(pidfd) == status
        close_pidfds([pidfd])
    assert describe_status(status) == sentence


def test_a_process_that_runs_or_cannot_be_held_has_no_exit_status() -> None:
    with process(signal.pause) as pid:
        (pidfd,) = open_pidfds([pid])
        assert exit_status(pidfd, patience_s=0.05) is None
        close_pidfds([pidfd])
    assert describe_status(exit_status(-1)) == "exit status unknown"


@pytest.fixture
def older_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As built by uv, conda, or for musl."""
    for module, name in CALLS:
        monkeypatch.delattr(module, name, raising=False)
    for name in [name for name in dir(os) if name.startswith("MFD_")]:
        monkeypatch.delattr(os, name)


def test_memory_is_shared_by_a_python_without_the_calls(older_python: None) -> None:
    fd = memfd.make("test", 4096, 7)
    assert memfd.is_sealed(fd, 4096)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_end_of_a_process_is_seen_by_a_python_without_the_calls(older_python: None) -> None:
    with process(lambda: os._exit(3)) as pid:
        (pidfd,) = open_pidfds([pid])
        assert exit_status(pidfd) == 3
        close_pidfds([pidfd])
    with pytest.raises(ProcessLookupError):
        open_pidfds([pid])


def test_a_machine_or_kernel_without_the_calls_shares_no_memory(
    older_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "other")
    assert memfd.make("test", 4096) == -1
    monkeypatch.setattr(memfd, "_PIDFD_OPEN", 9999)
    with pytest.raises(OSError, match="not implemented"):
        open_pidfds([os.getpid()])


# ------------------------------------------------------------------ many descriptors


@pytest.fixture
def many_files() -> Iterator[None]:
    """The next descriptor is above those that select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not open 1200 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_process_is_seen_above_1023_descriptors(many_files: None) -> None:
    with process(lambda: os._exit(0)) as pid:
        (low,) = open_pidfds([pid])
        pidfd = fcntl.fcntl(low, fcntl.F_DUPFD, 1100)
        assert pidfd >= 1100 and has_ended(pidfd, 10.0)
        close_pidfds([low, pidfd])


def test_no_file_uses_select_which_takes_1023_descriptors() -> None:
    for path in Path(shoal.__file__).parent.rglob("*.py"):
        assert not re.search(r"select\.select\(|SelectSelector", path.read_text()), path


# ------------------------------------------------------------------ signals


@pytest.fixture
def signals() -> Iterator[None]:
    """A profiler: a signal every millisecond."""
    former = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


def test_signals_do_not_hinder_ranks_that_share_memory(signals: None) -> None:
    fd = memfd.make("test", 64 << 20)
    assert memfd.is_sealed(fd, 64 << 20)
    os.close(fd)
    for _ in range(3 * is_built()):  # 64 MB: the calls take longer than the time between signals
        segment = join(lambda message: [message], 0, 1, slot_bytes=16 << 20)
        assert segment is not None
        segment.close()
