"""Ranks of a torchrun that was killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.launch.rank import rendezvous
from shoal.launch.rank.environment import Placement
from tests.launch.helpers import ROOT
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
