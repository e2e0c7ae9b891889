"""The gradients of a pipeline are those of torch.distributed.pipelining, over Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_gpipe_and_1f1b_give_the_gradients_of_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.replica.pipelining"]
    with open(tmp_path / "output", "wb") as output:
        processes = [
            subprocess.Popen(
                [*words, str(rank), str(tmp_path)],
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
    for rank in range(2):
        file = tmp_path / f"{rank}.json"
        assert file.is_file(), (tmp_path / "output").read_text()
        found = json.loads(file.read_text())
        assert set(found) == {"gpipe", "1f1b"}, found
        assert max(found.values()) < 1e-6
