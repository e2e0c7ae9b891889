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
import os, time
from shoal.launch.rank.rendezvous import ending_with_agent
with ending_with_agent(3, {"TORCHELASTIC_RUN_ID": "7"}):
    parent = os.getppid()
    print("ready", flush=True)
    while WAITS or os.getppid() == parent:
        time.sleep(0.05)
    raise RuntimeError("another rank has ended before this one looked")
"""
AGENT = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("waits", ["True", "False"])
def test_a_rank_whose_agent_was_killed_says_so_and_ends(waits: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGENT, RANK.replace("WAITS", waits)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,  # its end is the end of the rank
        text=True,
        timeout=60,
    )
    assert done.stderr == "shoal: rank 3 ends: torchrun, which has started it, was killed\n"


def test_a_rank_that_comes_after_the_end_of_the_agent_does_not_wait_for_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.0)
    placement = Placement("torchrun", 1, 2, 1, 2, "env://")
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with pytest.raises(ShoalError, match="rank 1: torchrun's agent does not answer at localhost:"):
        rendezvous.require_agent_store(placement, environ)
