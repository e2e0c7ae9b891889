"""torchrun starts ranks again, and they go on from their checkpoint to the same loss."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.resuming import environ, final, free_port, undisturbed, write_script

MODULE = (sys.executable, "-m", "torch.distributed.run")
LOCAL = ("--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def torchrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    write_script(folder)
    command = [*MODULE, *args]
    return subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True)


@pytest.mark.whole
@pytest.mark.parametrize("what", ["rank-SIGKILL", "rank-SIGTERM", "rank-SIGUSR1"])
def test_a_rank_that_crashes_or_gets_a_signal_is_started_again(
    tmp_path: Path, expected: float, what: str
) -> None:
    done = torchrun(tmp_path, *LOCAL, "--max-restarts", "1", "train.py", what, "1")
    assert final(done, 2) == expected
    assert "resuming from saved after" in done.stderr
    assert ("preempted: stopped after step" in done.stderr) == (what != "rank-SIGKILL")


@pytest.mark.whole
@pytest.mark.parametrize("what", ["parent-SIGTERM", "parent-SIGKILL"])
def test_after_the_end_of_torchrun_another_one_goes_on(
    tmp_path: Path, expected: float, what: str
) -> None:
    stopped = torchrun(tmp_path, *LOCAL, "train.py", what, "1")
    assert stopped.returncode != 0
    is_asked = what == "parent-SIGTERM"
    assert ("preempted: stopped after step" in stopped.stderr) == is_asked
    assert "Traceback" not in stopped.stderr or is_asked  # of torchrun itself
    assert final(torchrun(tmp_path, *LOCAL, "train.py"), 2) == expected


class Nodes:
    """Agents of one elastic job of one to two nodes."""

    def __init__(self, folder: Path, **variables: str):
        write_script(folder)
        self._folder = folder
        self._environ = environ(SHOAL_SECRET=secrets.token_hex(32), **variables)
        self._port = free_port()
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *args: str) -> subprocess.Popen[str]:
        conf = f"is_host={int(not self.agents)},last_call_timeout=5"
        command = [*MODULE, "--nnodes", "1:2", "--max-restarts", "3", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-conf", conf]
        command += ["--rdzv-endpoint", f"localhost:{self._port}", "train.py", *args]
        pipe = subprocess.PIPE
        agent = subprocess.Popen(
            command, cwd=self._folder, env=self._environ, stdout=pipe, stderr=pipe, text=True
        )
        self.agents.append(agent)
        return agent

    def end(self, agent: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, err = agent.communicate()
        return subprocess.CompletedProcess("torchrun", agent.returncode, out, err)


@contextmanager
def nodes(folder: Path, **variables: str) -> Iterator[Nodes]:
    made = Nodes(folder, **variables)
    try:
        yield made
    finally:
        for agent in made.agents:
            agent.terminate()
            agent.communicate()


@pytest.mark.whole
@pytest.mark.parametrize("what", ["both-SIGKILL", "parent-SIGKILL"])
def test_when_a_node_is_lost_the_other_goes_on_alone(
    tmp_path: Path, expected: float, what: str
) -> None:
    with nodes(tmp_path) as job:
        kept, lost = job.start(what, "none"), job.start(what, "any")
        ends = job.end(lost), job.end(kept)
    assert ends[0].returncode == -signal.SIGKILL
    assert final(ends[1], 1) == expected
    assert "resuming from saved after" in ends[1].stderr


@pytest.mark.whole
def test_when_a_node_comes_both_go_on(tmp_path: Path, expected: float) -> None:
    # with one store for agents and ranks, torch 2.13 keeps its address from a node that joins
    with nodes(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as job:
        first = job.start("file-alone", "any", "0.5")
        while not (tmp_path / "alone").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        second = job.start()
        ends = job.end(first), job.end(second)
    assert "preempted: stopped after step" in ends[0].stderr
    assert ends[1].returncode == 0, ends[1].stderr
    found = [end for end in ends if "final" in end.stdout]  # rank 0 may be at either
    assert final(found[0], 2) == expected
