"""Runs whose servers have replicas, with servers that are killed: what users see."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

pytestmark = pytest.mark.whole

SCRIPT = """
import sys, torch, shoal
from torch import nn
from torch.nn import functional as F

def train(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    data = torch.utils.data.TensorDataset(torch.randn(960, 16), torch.randint(0, 4, (960,)))
    step = job.step(model, F.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    for batch in job.batches(data, 32, epochs=1):
        step(batch)
    with step.sync.full_weights():
        if job.rank == 0:
            torch.save(step.flat.data.clone(), sys.argv[1])

shoal.run(train)
"""


def run(folder: Path, name: str, strategy: str, *options: str) -> tuple[Any, str, dict[str, Any]]:
    """The final weights, stderr and the report of a run."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    weights = folder / f"{name}.pt"
    report = folder / f"{name}.json"
    command = [sys.executable, "-m", "shoal", "run", str(script), "-n", "2", "-s", strategy]
    command += [*options, "--report", str(report), "--", str(weights)]
    ended = forked.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return torch.load(weights), ended.stderr, json.loads(report.read_text())


def kills(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--kill", text)]


def test_a_synchronous_run_with_three_killed_servers_ends_with_the_weights_of_one_without(
    tmp_path: Path,
) -> None:
    strategy = "ps(servers=2, replicas=3)"
    undisturbed, stderr, _ = run(tmp_path, "undisturbed", strategy)
    assert "no acknowledged push is lost while one of them lives" in stderr
    options = kills("server:0@5", "server:4@12", "server:1@20")
    weights, stderr, report = run(tmp_path, "killed", strategy, *options)
    assert torch.equal(weights, undisturbed), "bit for bit"
    assert "servers lost: 3; " in stderr
    assert "shard 1: 30 updates" in stderr
    assert [lost["server"] for lost in report["servers_lost"]] == [0, 4, 1]
    assert report["without_service_s"] > 0
