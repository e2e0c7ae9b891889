"""Runs whose servers have replicas, with servers that are killed: what users see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import script, shoal

SCRIPT = script("""
import hashlib

def train(job):
    step = job.step(model(), loss, optimizer=partial(torch.optim.AdamW, lr=0.01))
    for batch in job.batches(data, batch_size=20, epochs=5):
        step(batch)
    with step.sync.full_weights():
        job.print("bits", hashlib.sha256(step.flat.data.numpy().tobytes()).hexdigest())
""")


def run(folder: Path, *kills: str) -> tuple[str, str, dict[str, Any]]:
    """The final weights, stderr and the report of a run."""
    (folder / "train.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "-s", "ps(servers=2, replicas=3)", "--report", "report"]
    words += [word for kill in kills for word in ("--kill", kill)]
    ended = shoal(*words, "train.py", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr, json.loads((folder / "report").read_text())


@pytest.mark.whole
def test_a_synchronous_run_with_three_killed_servers_ends_with_the_weights_of_one_without(
    tmp_path: Path,
) -> None:
    undisturbed, stderr, _ = run(tmp_path)
    assert "no acknowledged push is lost while one of them lives" in stderr
    weights, stderr, report = run(tmp_path, "server:0@5", "server:4@12", "server:1@20")
    assert "bits" in weights and weights == undisturbed, "bit for bit"
    assert "servers lost: 3; " in stderr
    assert "shard 1: 30 updates" in stderr
    assert [lost["server"] for lost in report["servers_lost"]] == [0, 4, 1]
    assert report["without_service_s"] > 0
