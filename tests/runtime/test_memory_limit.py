"""The limits of a machine and of a container: memory, open files, cores."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from shoal.comm.transport.shm import memfd
from shoal.comm.transport.tcp.connect import require_open_files
from shoal.errors import BadInput
from shoal.launch.losses.failures import ProcessFailure, launch_error
from shoal.runtime import memory_limit
from shoal.runtime.memory_limit import (
    MemoryLeft,
    OutOfMemoryKills,
    memory_left,
    most_server_threads,
    server_threads,
    threads_of,
)

GB = 1 << 30
TWO = {
    "proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16777216 kB\n",
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/box/memory.max": f"{4 * GB}\n",
    "sys/fs/cgroup/pod/box/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/pod/box/memory.stat": f"anon 5\nactive_file {GB}\ninactive_file 0\n",
    "sys/fs/cgroup/pod/box/memory.events": "oom 0\noom_kill 2\n",
    "sys/fs/cgroup/pod/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.current": "1\n",
}
OUTER = {**TWO, "sys/fs/cgroup/pod/memory.max": f"{GB}\n"}
ONE = {  # of version 1, whose container sees its own folder as the top
    "proc/meminfo": TWO["proc/meminfo"],
    "proc/self/cgroup": "7:cpu,cpuacct:/docker/ab\n5:memory:/docker/ab\n0::/system.slice\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_active_file {GB}\ntotal_inactive_file 0\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}
FREE = {**ONE, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
MACHINE = {"proc/meminfo": TWO["proc/meminfo"], "proc/self/cgroup": "0::/\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (TWO, MemoryLeft(2 * GB, "this container")),  # its limit less what is used, and no cache
        (OUTER, MemoryLeft(GB - 1, "this container")),
        (ONE, MemoryLeft(2 * GB, "this container")),
        (FREE, MemoryLeft(16 * GB, "this machine")),
        (MACHINE, MemoryLeft(16 * GB, "this machine")),
        ({}, None),
    ],
)
def test_what_is_left(tmp_path: Path, files: dict[str, str], left: MemoryLeft | None) -> None:
    assert memory_left(write(tmp_path, files)) == left


@pytest.mark.parametrize(
    ("files", "counter"),
    [
        (TWO, "sys/fs/cgroup/pod/box/memory.events"),
        (ONE, "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_a_kill_is_noticed(tmp_path: Path, files: dict[str, str], counter: str) -> None:
    kills = OutOfMemoryKills(write(tmp_path, files))
    assert not kills.has_struck()
    write(tmp_path, {counter: files[counter].replace("oom_kill 2", "oom_kill 3")})
    assert kills.has_struck()


def test_memory_that_does_not_fit_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, TWO)
    monkeypatch.setattr(memfd, "memory_left", lambda: memory_limit.memory_left(root))
    assert memfd.make("weights", 3 * GB) == -1
    sentence = "3.22 GB of shared memory (weights) do not fit: this container has 2.15 GB left"
    assert sentence in capsys.readouterr().err


def test_the_soft_limit_is_raised_and_the_hard_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    require_open_files(400)
    assert not raised
    require_open_files(1020)
    assert raised == [(1532, 4096)]
    with pytest.raises(BadInput, match=r"may have 4096: .* ulimit -n 4592"):
        require_open_files(4080)


def test_a_small_slice_is_left_to_one_core_and_servers_share_those_of_their_host() -> None:
    assert server_threads(1 << 20, most=16) == 1
    assert server_threads(64 << 20, most=16) == 8
    assert server_threads(1 << 40, most=16) == 16
    assert most_server_threads(16, servers=2) == 8
    assert most_server_threads(2, servers=4) == 1
    assert int(threads_of(1)["OMP_NUM_THREADS"]) >= 1


def test_the_launcher_names_the_out_of_memory_killer() -> None:
    struck = ProcessFailure(1, -9, 0, out_of_memory=True)
    assert "SIGKILL, of the kernel's out-of-memory killer: take" in str(launch_error(struck))
    other = ProcessFailure(1, -15, 0, out_of_memory=True)
    assert str(launch_error(other)).endswith("worker 1 was killed by SIGTERM")
