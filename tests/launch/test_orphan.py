"""Processes that end with the one that has started them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.launch.here import local
from shoal.launch.here.processes import Processes
from shoal.launch.hosts import remote
from shoal.worker import environment, rendezvous
from shoal.worker.environment import Placement
from tests.launch.helpers import DIE_WITH_LAUNCHER, ROOT, free_port

RANK = """
import time
from shoal.runtime.parent_death import die_with_launcher
die_with_launcher(None, {"TORCHELASTIC_RUN_ID": "7"})
print("ready", flush=True)
time.sleep(600)
"""
AGENT = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
os.kill(os.getpid(), 9)
"""


def test_a_rank_ends_with_a_torchrun_that_was_killed() -> None:
    """The end of its stderr is the end of the rank."""
    command = [sys.executable, "-c", AGENT, RANK]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=60).stderr == b""


def test_a_rank_that_comes_after_the_end_of_the_agent_does_not_wait_for_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.0)
    placement = Placement("torchrun", 1, 2, 1, 2, "env://")
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with pytest.raises(ShoalError, match="rank 1: torchrun's agent does not answer at localhost:"):
        rendezvous.require_agent_store(placement, environ)


@pytest.mark.parametrize(
    ("session", "launcher", "output"),
    [
        (True, "1", b""),
        (True, str(os.getpid()), b"on\n"),
        (False, "1", b"on\n"),
        (True, "", b"on\n"),
    ],
    ids=["adopted", "of this process", "behind a wrapper", "unknown"],
)
def test_a_worker_whose_launcher_has_exited_ends(
    session: bool, launcher: str, output: bytes
) -> None:
    command = [sys.executable, "-c", f"{DIE_WITH_LAUNCHER}print('on')"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SHOAL_LAUNCHER_PID": launcher}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, start_new_session=session)
    assert done.stdout == output


@pytest.mark.parametrize(
    "modules",
    [
        [environment, local, remote, rendezvous],  # of the launcher
        ["shoal.server.main"],  # a server can die with its launcher before it waits for anything
    ],
)
def test_launchers_and_servers_start_without_torch(modules: list[Any]) -> None:
    names = [getattr(module, "__name__", module) for module in modules]
    script = f"import sys\nfor n in {names}: __import__(n)\n"
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_the_data_loaders_of_a_killed_worker_end_with_it() -> None:
    """Its pipe of stdout is closed when none of its children has it any more."""
    command = ["sh", "-c", "sleep 600 & kill -9 $$"]
    with Processes(lambda exit: None) as processes:
        out, err = processes.start(command, dict(os.environ))
        processes.watch()
        try:
            assert os.read(out, 1) == b""
        finally:
            os.close(out)
            os.close(err)
