"""torchrun starts ranks again, and they go on from their checkpoint to the same loss."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.helpers import ROOT
from tests.scripts import HEAD

RESUMED = (
    HEAD
    + """
import signal, time

def strike(job):
    '''Once: a signal to this rank, or to the process that started it.'''
    how, rank = sys.argv[1:3]
    mark = "struck"
    if job.steps == 30 and rank in ("any", str(job.rank)) and not os.path.exists(mark):
        open(mark, "w").close()
        number = getattr(signal, how.removeprefix("agent-"))
        os.kill(os.getppid() if how.startswith("agent-") else os.getpid(), number)
        if how == "agent-SIGKILL":
            os.kill(os.getpid(), number)  # the node is lost
    if os.path.exists(mark):
        time.sleep(0.02)  # so that it does not end before the signal is heard

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=60):
        value = step(batch)
        if len(sys.argv) > 1 and job.steps < 300:
            strike(job)
    job.print("final", float(value), job.size)

if __name__ == "__main__":
    shoal.run(train)
"""
)


def environ(**others: str) -> dict[str, str]:
    ours = {"PYTHONPATH": str(ROOT), "SHOAL_CHECKPOINT": "saved", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, "SHOAL_CHECKPOINT_EVERY": "7", **others}


def free_port() -> int:
    """Below those that the kernel gives out: no other process takes it meanwhile."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(end // 2, end)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port


def torchrun(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(RESUMED)
    module = [sys.executable, "-m", "torch.distributed.run"]
    return subprocess.run(
        [*module, *args], cwd=folder, env=environ(**env), capture_output=True, text=True
    )


def final(done: subprocess.CompletedProcess[str]) -> float:
    found = re.search(r"final ([0-9.e-]+)", done.stdout)
    assert done.returncode == 0 and found, done.stderr
    return float(found[1])


LOCAL = ("--standalone", "--nproc-per-node", "2")


@pytest.mark.whole
def test_after_a_crash_a_signal_and_a_signal_to_torchrun_the_loss_is_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain").mkdir()
    expected = final(torchrun(tmp_path / "plain", *LOCAL, "train.py"))
    for how in ("SIGKILL", "SIGTERM", "SIGUSR1"):
        folder = tmp_path / how
        folder.mkdir()
        done = torchrun(folder, *LOCAL, "--max-restarts", "1", "train.py", how, "1")
        assert final(done) == expected
        assert "resuming from saved after" in done.stderr
    folder = tmp_path / "agent"
    folder.mkdir()
    stopped = torchrun(folder, *LOCAL, "train.py", "agent-SIGTERM", "1")
    assert stopped.returncode != 0
    assert "preempted: stopped after step" in stopped.stderr
    assert final(torchrun(folder, *LOCAL, "train.py")) == expected


@pytest.mark.whole
def test_when_a_node_is_lost_the_others_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMED)
    module = [sys.executable, "-m", "torch.distributed.run"]
    endpoint = f"localhost:{free_port()}"
    command = [*module, "--nnodes", "1:2", "--max-restarts", "3", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", endpoint]

    def start(is_host: bool, victim: str) -> subprocess.Popen[str]:
        conf = f"is_host={int(is_host)},last_call_timeout=5"
        return subprocess.Popen(
            [*command, "--rdzv-conf", conf, "train.py", "agent-SIGKILL", victim],
            cwd=tmp_path,
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    agents = [start(True, "none"), start(False, "any")]
    ends = [agent.communicate(timeout=300) for agent in agents]
    assert agents[1].returncode == -signal.SIGKILL
    assert agents[0].returncode == 0, ends[0][1]
    assert re.search(r"final \S+ 1", ends[0][0])  # one worker at the end
    assert "resuming from saved after" in ends[0][1]
