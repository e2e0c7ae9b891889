"""Workers that are killed and started again, in whole runs."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.chaos.returns import STRATEGIES, attack
from tests.launch.helpers import ROOT

SEEDS = (1, 2, 3)
ASYNC = 'ps(mode="async")'


def accuracy(folder: Path, seed: int, *options: str) -> tuple[float, list[dict[str, float]]]:
    """The test accuracy of digits in points, and the workers that came back."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "shoal", "run", "digits", "-n", "4", "-s", ASYNC]
    command += ["--seed", str(seed), "--report", str(report), *options, "--", "--epochs", "50"]
    forked.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    document = json.loads(report.read_text())
    return 100 * document["ranks"][0]["evaluated"]["accuracy"], document["came_back"]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_run_in_which_a_worker_comes_back_is_as_accurate_as_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """Of 297 images one is 0.34 points: the mean over seeds is compared."""
    plain = [accuracy(tmp_path, seed)[0] for seed in SEEDS]
    hit = [accuracy(tmp_path, seed, "--kill", "2@50", "--restart", "1") for seed in SEEDS]
    assert all(worker["away_s"] is not None for _, back in hit for worker in back)
    assert abs(sum(plain) - sum(points for points, _ in hit)) / len(SEEDS) <= 0.5


@pytest.mark.whole
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_runs_end_by_themselves_whatever_workers_are_killed(tmp_path: Path, strategy: str) -> None:
    outcome = attack(strategy, 5, random.Random(3), tmp_path)
    assert outcome.startswith("finished after"), outcome
