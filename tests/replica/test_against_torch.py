"""Pipelines and tensor parallelism give what torch.distributed's own give, over Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def by_two(module: str, folder: Path) -> list[dict[str, float]]:
    """What two processes that run `module` have found."""
    with open(folder / "output", "wb") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(folder)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                process.wait(timeout=90)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), (folder / "output").read_text()
    return [json.loads(file.read_text()) for file in files]


def test_gpipe_and_1f1b_give_the_gradients_of_torch(tmp_path: Path) -> None:
    for found in by_two("tests.replica.pipelining", tmp_path):
        assert set(found) == {"gpipe", "1f1b"}, found
        assert max(found.values()) < 1e-6


def test_a_tp_plan_gives_what_parallelize_module_gives(tmp_path: Path) -> None:
    for found in by_two("tests.replica.dtensor", tmp_path):
        assert set(found) == {"outputs", "slices", "gradients"}, found
        assert found["slices"] == 0.0
        assert max(found.values()) < 1e-6
