"""Runs of processes whose workers are killed, come back and join."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.train.checkpoints import files
from tests import forked
from tests.chaos.elastic_kills import sweep
from tests.disturbed import Disturbances
from tests.launch.helpers import ROOT

SCRIPT = """
import os, sys, time, torch, shoal
from functools import partial

folder, steps, pause_s, waits_at = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]

class Tally(torch.nn.Module):
    # With a learning rate of the batch size, each training of sample i takes 1 from weight i.
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(96))

    def forward(self, rows):
        return (rows @ self.counts).mean()

def train(job):
    torch.manual_seed(0)
    if sys.argv[5] == "tally":
        data = torch.utils.data.TensorDataset(torch.eye(96))
        step = job.step(Tally(), optimizer=partial(torch.optim.SGD, lr=24))
    else:
        data = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.arange(96) % 3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.2),
                                    torch.nn.Linear(32, 3))
        step = job.step(model, torch.nn.functional.cross_entropy, exact=True,
                        optimizer=partial(torch.optim.Adam, lr=0.01))
    with open(f"{folder}/run_dir", "w") as file:
        file.write(os.environ.get("SHOAL_RUN_DIR", ""))
    with open(f"{folder}/pid-{job.rank}.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{folder}/pid-{job.rank}.new", f"{folder}/pid-{job.rank}")
    if os.environ.get("SHOAL_INCARNATION", "0") != "0":
        open(f"{folder}/late", "w").close()
    for batch in job.batches(data, batch_size=24, epochs=steps // 4):
        job.log(loss=step(batch))
        with open(f"{folder}/log", "a") as file:
            file.write(f"{time.monotonic()} {job.rank} {job.steps}\\n")
        time.sleep(pause_s)
        while job.steps == int(waits_at) and not os.path.exists(f"{folder}/late"):
            time.sleep(0.01)
    job.save(f"{folder}/saved")

shoal.run(train)
"""


def start(
    folder: Path,
    steps: int,
    pause_s: float,
    *options: str,
    waits_at: int = 0,
    model: str = "exact",
) -> forked.Popen:
    """`waits_at`: after this step all wait until a worker has come later."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", str(script), *options]
    command += ["--report", str(folder / "report.json")]
    command += ["--", str(folder), str(steps), str(pause_s), str(waits_at), model]
    pipes: dict[str, Any] = {"stdout": forked.subprocess.PIPE, "stderr": forked.subprocess.PIPE}
    return forked.Popen(command, cwd=ROOT, text=True, **pipes)


def bits(process: forked.Popen, folder: Path) -> tuple[str, str]:
    """The digest of the checkpoint that a run ended with, and what it wrote."""
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    saved = files.read(folder / "saved")
    tensors = [*saved.model.values(), *saved.optimizer.values()]
    bits = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(bits).hexdigest(), out + err


def counts(process: forked.Popen, folder: Path) -> tuple[Tensor, str]:
    """How often each sample has counted, and what the run wrote."""
    _, err = bits(process, folder)
    return -files.read(folder / "saved").model["0:counts"], err


def log_of(folder: Path) -> list[tuple[float, int, int]]:
    """The time of each step, by worker: time, worker, step."""
    if not (folder / "log").exists():
        return []
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 3]


def wait_for_step(folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + 300
    while not any(done >= step for _, _, done in log_of(folder)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


SHARDED = [f"zero({stage}, elastic=True)" for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    "strategy",
    ["ddp(elastic=True)", *(pytest.param(text, marks=pytest.mark.whole) for text in SHARDED)],
)
def test_a_killed_worker_and_its_return_change_no_bit(tmp_path: Path, strategy: str) -> None:
    plain = start(tmp_path / "plain", 40, 0.0, "-n", "1")
    options = ("-n", "3", "-s", strategy, "--kill", "0@9", "--restart", "1")
    hit = start(tmp_path / "hit", 40, 0.05, *options, waits_at=12)
    wanted, _ = bits(plain, tmp_path / "plain")
    found, said = bits(hit, tmp_path / "hit")
    assert found == wanted
    assert "worker 0 was lost at step 9 and came back after" in said
    assert "[1] step 10/40  loss" in said, "progress comes from the first worker that is there"
    assert "[0] step 40/40  loss" in said
    document = json.loads((tmp_path / "hit" / "report.json").read_text())
    (back,) = document["came_back"]
    assert back["lost_at"] == 8
    assert document["steps"] == 40
    used = {step for _, worker, step in log_of(tmp_path / "hit") if worker == 0}
    assert set(range(back["step"] + 1, 41)) <= used


def test_a_run_of_too_few_workers_ends_with_one_sentence(tmp_path: Path) -> None:
    options = ("--elastic", "2:2", "--kill", "1@5")
    process = start(tmp_path / "run", 40, 0.0, *options)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    assert err.strip().endswith("1 worker is left, fewer than the 2 of --elastic")


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "zero(3)"])
def test_a_worker_that_joins_at_step_40_of_100_is_used(tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "run"
    plain = start(tmp_path / "plain", 100, 0.0, "-n", "1")
    options = ("-n", "2", "--elastic", "1:3", "-s", strategy)
    process = start(folder, 100, 0.1, *options, waits_at=40)
    wait_for_step(folder, 40)
    command = [sys.executable, "-m", "shoal", "join", (folder / "run_dir").read_text()]
    forked.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    found, err = bits(process, folder)
    assert found == bits(plain, tmp_path / "plain")[0]
    joined = re.search(r"worker 2 joined at step (\d+)", err)
    assert joined is not None
    used = {step for _, worker, step in log_of(folder) if worker == 2}
    assert used == set(range(int(joined[1]), 101))


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp(elastic=True)", "zero(2, elastic=True)"])
def test_a_worker_that_is_stopped_for_longer_than_the_timeout_disturbs_no_bit(
    tmp_path: Path, strategy: str
) -> None:
    folder = tmp_path / "run"
    plain = start(tmp_path / "plain", 60, 0.0, "-n", "1")
    options = ("-n", "3", "-s", strategy, "--timeout", "20", "--restart", "1")
    process = start(folder, 60, 0.1, *options, waits_at=20)
    wait_for_step(folder, 5)
    os.kill(int((folder / "pid-1").read_text()), signal.SIGSTOP)
    found, err = bits(process, folder)
    assert found == bits(plain, tmp_path / "plain")[0]
    assert "worker 1 has been stopped for 20 s and is killed: --timeout" in err
    assert re.search(r"worker 1 was lost at step \d+ and came back", err)


AVERAGES = ["localsgd(every=4)", 'gossip(graph="complete")', "gossip"]


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", AVERAGES)
def test_each_sample_counts_once_when_a_worker_is_killed_and_comes_back(
    tmp_path: Path, strategy: str
) -> None:
    options = ("--elastic", "1:3", "-s", strategy, "--kill", "1@9", "--restart", "1")
    run = start(tmp_path / "run", 60, 0.1, *options, waits_at=12, model="tally")
    found, err = counts(run, tmp_path / "run")
    torch.testing.assert_close(found, torch.full_like(found, 60 / 4))
    assert "worker 1 was lost at step 9 and came back after" in err


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", AVERAGES)
def test_each_sample_counts_once_when_a_worker_joins(tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "run"
    options = ("-n", "2", "--elastic", "1:3", "-s", strategy)
    process = start(folder, 80, 0.1, *options, waits_at=40, model="tally")
    wait_for_step(folder, 40)
    command = [sys.executable, "-m", "shoal", "join", (folder / "run_dir").read_text()]
    forked.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    found, err = counts(process, folder)
    torch.testing.assert_close(found, torch.full_like(found, 80 / 4))
    joined = re.search(r"worker 2 joined at step (\d+)", err)
    assert joined is not None
    used = {step for _, worker, step in log_of(folder) if worker == 2}
    assert used == set(range(int(joined[1]), 81))


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", ["ddp", "zero(1)", "zero(2)", "zero(3)"])
def test_twenty_kills_at_random_moments_change_no_bit(strategy: str) -> None:
    said = sweep(strategy, Disturbances())
    print(said)
    assert not said.startswith("WRONG"), said
