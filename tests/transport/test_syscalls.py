"""Shared memory where the operating system is not as expected: calls, descriptors, signals."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.transport.shm import memfd
from shoal.transport.shm.process_exit import (
    close_pidfds,
    exit_status,
    has_ended,
    open_pidfds,
)
from shoal.transport.shm.segment import is_built, join

CALLS = [(os, "memfd_create"), (os, "pidfd_open"), (signal, "pidfd_send_signal")]


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
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    (pidfd,) = open_pidfds([pid])
    assert exit_status(pidfd) == 3
    os.waitpid(pid, 0)
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
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    (low,) = open_pidfds([pid])
    pidfd = fcntl.fcntl(low, fcntl.F_DUPFD, 1100)
    try:
        assert pidfd >= 1100 and has_ended(pidfd, 10.0)
    finally:
        os.waitpid(pid, 0)
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


@pytest.mark.skipif(not is_built(), reason="built without a compiler")
def test_signals_do_not_hinder_ranks_that_share_memory(signals: None) -> None:
    for _ in range(3):  # 64 MB: the calls take longer than the time between signals
        segment = join(lambda message: [message], 0, 1, slot_bytes=16 << 20)
        assert segment is not None
        segment.close()


def test_signals_do_not_hinder_memory_without_a_native_part(signals: None) -> None:
    fd = memfd.make("test", 64 << 20)
    assert memfd.is_sealed(fd, 64 << 20)
    os.close(fd)
