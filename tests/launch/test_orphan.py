"""Processes that end with the one that has started them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.launch.here import local
from shoal.launch.here.processes import Processes
from shoal.launch.hosts import remote
from shoal.launch.rank import environment, rendezvous
from shoal.launch.rank.environment import Placement
from tests.launch.helpers import DIE_WITH_LAUNCHER, ROOT
from tests.launch.resuming import free_port

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


def test_a_worker_whose_launcher_has_exited_ends() -> None:
    script = f"{DIE_WITH_LAUNCHER}print('on')"
    base = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL")}
    for session, launcher, output in (
        (True, "1", b""),  # a worker that was adopted
        (True, str(os.getpid()), b"on\n"),
        (False, "1", b"on\n"),  # behind a wrapper
        (True, None, b"on\n"),
    ):
        env = {**base, "PYTHONPATH": str(ROOT)}
        if launcher is not None:
            env["SHOAL_LAUNCHER_PID"] = launcher
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE,
            start_new_session=session, check=False,
        )  # fmt: skip
        assert done.stdout == output


def test_the_launcher_does_not_load_torch() -> None:
    names = [environment, local, remote, rendezvous]
    script = f"import sys\nfor n in {[name.__name__ for name in names]}: __import__(n)\n"
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_server_waits_for_nothing_before_it_can_die_with_its_launcher() -> None:
    script = "import sys, shoal.server.main; assert not {'torch', 'numpy'} & set(sys.modules)"
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
