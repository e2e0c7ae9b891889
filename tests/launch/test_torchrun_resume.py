"""torchrun starts ranks again, and they go on from their checkpoint to the same loss.

The script is struck once after its 30th step. With `exact` the loss has the same bits at any
number of workers, so one process tells the loss that it has without that.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.launch.helpers import ROOT, free_port
from tests.scripts import script

SCRIPT = script("""
import signal, time

is_first_start = not os.path.exists("struck")

def strike(job, what, rank, pause_s="0.05"):
    '''After step 30: a signal to this rank, to its parent or to both, or a file.'''
    if job.steps == 30 and rank in ("any", str(job.rank)):
        open("struck", "w").close()
        target, name = what.split("-")
        if target == "file":
            open(name, "w").close()
        if target in ("parent", "both"):
            os.kill(os.getppid(), getattr(signal, name))
        if target in ("rank", "both"):
            os.kill(os.getpid(), getattr(signal, name))
    if os.path.exists("struck"):
        time.sleep(float(pause_s))  # so that it does not end before the signal is heard

def train(job):
    step = job.step(model(), loss, optimizer=sgd, exact=True)
    for batch in job.batches(data, batch_size=20, epochs=50):
        value = step(batch)
        if is_first_start and sys.argv[1:]:
            strike(job, *sys.argv[1:])
    job.print("final", float(value), job.size)
""")
MODULE = (sys.executable, "-m", "torch.distributed.run")
LOCAL = (*MODULE, "--standalone", "--nproc-per-node", "2")
SAVES = {"SHOAL_CHECKPOINT": "saved", "SHOAL_CHECKPOINT_EVERY": "7"}
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **SAVES}
pytestmark = pytest.mark.whole


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    start = subprocess.run if "torch.distributed.run" in command else forked.run
    return start(command, cwd=folder, env=ENVIRON, capture_output=True, text=True)


def final(done: subprocess.CompletedProcess[str], workers: int) -> float:
    """The last loss of a run that has succeeded, with so many workers at its end."""
    found = re.search(rf"final (\S+) {workers}$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stderr
    return float(found[1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    return final(run(tmp_path_factory.mktemp("undisturbed"), sys.executable, "train.py"), 1)


@pytest.mark.parametrize("what", ["rank-SIGKILL", "rank-SIGTERM", "rank-SIGUSR1"])
def test_a_rank_that_crashes_or_gets_a_signal_is_started_again(
    tmp_path: Path, expected: float, what: str
) -> None:
    done = run(tmp_path, *LOCAL, "--max-restarts", "1", "train.py", what, "1")
    assert final(done, 2) == expected
    assert "resuming from saved after" in done.stderr
    assert ("preempted: stopped after step" in done.stderr) == (what != "rank-SIGKILL")


@pytest.mark.parametrize("what", ["parent-SIGTERM", "parent-SIGKILL"])
def test_after_the_end_of_torchrun_another_one_goes_on(
    tmp_path: Path, expected: float, what: str
) -> None:
    stopped = run(tmp_path, *LOCAL, "train.py", what, "1")
    assert stopped.returncode != 0
    is_asked = what == "parent-SIGTERM"
    assert ("preempted: stopped after step" in stopped.stderr) == is_asked
    assert "Traceback" not in stopped.stderr or is_asked  # of torchrun itself
    assert final(run(tmp_path, *LOCAL, "train.py"), 2) == expected


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an agent of one elastic job of one to two nodes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    endpoint, secret = f"localhost:{free_port()}", secrets.token_hex(32)
    agents: list[subprocess.Popen[str]] = []

    def start(*args: str, **variables: str) -> subprocess.Popen[str]:
        conf = f"is_host={int(not agents)},last_call_timeout=5"
        command = [*MODULE, "--nnodes", "1:2", "--max-restarts", "3", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-conf", conf]
        command += ["--rdzv-endpoint", endpoint, "train.py", *args]
        environ = {**ENVIRON, "SHOAL_SECRET": secret, **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        agents.append(subprocess.Popen(command, cwd=tmp_path, env=environ, text=True, **pipes))
        return agents[-1]

    yield start
    for agent in agents:
        agent.terminate()
        agent.communicate()


def end(agent: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = agent.communicate()
    return subprocess.CompletedProcess("torchrun", agent.returncode, out, err)


@pytest.mark.parametrize("what", ["both-SIGKILL", "parent-SIGKILL"])
def test_when_a_node_is_lost_the_other_goes_on_alone(
    start: Start, expected: float, what: str
) -> None:
    kept, lost = start(what, "none"), start(what, "any")
    assert end(lost).returncode == -signal.SIGKILL
    ended = end(kept)
    assert final(ended, 1) == expected
    assert "resuming from saved after" in ended.stderr


def test_when_a_node_comes_both_go_on(tmp_path: Path, start: Start, expected: float) -> None:
    # with one store for agents and ranks, torch 2.13 keeps its address from a node that joins
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = start("file-alone", "any", "0.5", **apart)
    while not (tmp_path / "alone").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    second = start(**apart)
    ends = end(first), end(second)
    assert "preempted: stopped after step" in ends[0].stderr
    assert ends[1].returncode == 0, ends[1].stderr
    found = [end for end in ends if "final" in end.stdout]  # rank 0 may be at either
    assert final(found[0], 2) == expected
