"""Processes beside the workers. Small scripts stand in for servers: nothing here loads torch."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadInput, ServerFailed, WorkersFailed
from shoal.runtime.run_dir import new_run_dir
from tests.launch.helpers import HOLD, Rope, Screen, launcher, run

HEAD = """
import os, signal, sys, time
index, run_dir = int(os.environ["SHOAL_SERVER_INDEX"]), os.environ["SHOAL_RUN_DIR"]
"""
READY = "open(f'{run_dir}/ready-{index}', 'w').close()\n"
WAIT_FOR_SERVERS = """
for server in range(int(os.environ["SHOAL_SERVERS"])):
    while not os.path.exists(f"{run_dir}/ready-{server}"): time.sleep(0.005)
"""


def server(script: str) -> list[str]:
    return [sys.executable, "-c", HEAD + textwrap.dedent(script)]


def run_with(servers: int, script: str, worker: str, workers: int = 2, **options: Any) -> Screen:
    return run(worker, workers, servers=servers, server_command=server(script), **options)


def test_servers_have_their_index_and_end_after_the_workers() -> None:
    script = (
        "print(index, os.environ['SHOAL_SERVERS'], os.environ['SHOAL_SIZE'], "
        "'SHOAL_RANK' in os.environ, os.getsid(0) == os.getpid())\n"
        "def end(*_): print('told to end'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + READY + "time.sleep(60)\n"
    )
    screen = run_with(2, script, WAIT_FOR_SERVERS + "print('worker')")
    lines = screen.out.splitlines()
    assert sorted(lines) == [
        "[0] worker",
        "[1] worker",
        "[server 0] 0 2 2 False True",
        "[server 0] told to end",
        "[server 1] 1 2 2 False True",
        "[server 1] told to end",
    ]
    ends = [lines.index(f"[server {i}] told to end") for i in (0, 1)]
    assert min(ends) > max(lines.index("[0] worker"), lines.index("[1] worker"))


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("sys.exit('no room left') if index == 1 else time.sleep(60)", r"exit status 1 .*:\nno ro"),
        ("os.kill(os.getpid(), 9) if index == 1 else time.sleep(60)", "was killed by SIGKILL"),
    ],
)
def test_a_server_that_dies_fails_the_run_and_is_named(end: str, says: str) -> None:
    with pytest.raises(ServerFailed, match=rf"^server 1 (ended with )?{says}") as caught:
        run_with(2, end, "time.sleep(60)")
    assert caught.value.server == 1


def test_a_dead_server_wins_over_the_workers_that_lost_it() -> None:
    worker = """
        from shoal.errors import PeerLost
        from pathlib import Path
        from shoal.launch.losses.failures import report_failure
        from shoal.runtime.run_dir import RunDir
        while not os.path.exists(run_dir + "/pid"): time.sleep(0.005)
        while os.path.exists("/proc/" + os.readlink(run_dir + "/pid")): time.sleep(0.005)
        report_failure(RunDir(Path(run_dir)), rank, PeerLost(rank, None, "a pull"))
        sys.exit(1)
    """
    with pytest.raises(ServerFailed, match=r"^server 0 was killed by SIGKILL while workers"):
        tells = "os.symlink(str(os.getpid()), run_dir + '/pid')\n"
        run_with(1, tells + "os.kill(os.getpid(), 9)", worker)


def test_a_worker_that_fails_ends_the_servers_too(rope: Rope) -> None:
    script = HOLD + READY + "time.sleep(60)"
    with pytest.raises(WorkersFailed, match="boom"):
        worker = WAIT_FOR_SERVERS + "if rank == 1: raise ValueError('boom')\ntime.sleep(60)"
        run_with(1, script, worker, env={"ROPE": str(rope.path)})
    rope.wait_held(1)
    rope.wait_released()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_and_workers_end_with_their_launcher(rope: Rope, number: signal.Signals) -> None:
    """Also while they start, as if torch took a minute to load."""
    command = f"[sys.executable, '-c', {HEAD + HOLD + 'time.sleep(60)'!r}]"
    before = "from functools import partial\n"
    before += f"LaunchSpec = partial(LaunchSpec, servers=2, server_command={command})\n"
    with launcher("time.sleep(60)", 2, rope, before) as process:
        rope.wait_held(4)
        process.send_signal(number)
        rope.wait_released()


def test_a_secret_that_is_there_already_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("known already")
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix, dir: str(tmp_path))
    with pytest.raises(BadInput, match="is there already"), new_run_dir():
        raise AssertionError("it was used")
