"""A worker loads what it uses: strategies, servers and the planner are found by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts

SCRIPT = scripts.PLAIN.replace(
    "if __name__",
    """    job.print("loaded", *sorted(name for name in sys.modules if name.startswith("shoal.")))

if __name__""",
)


@pytest.mark.whole
def test_a_ddp_worker_has_loaded_at_most_170_modules_after_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", "-n", "2", "-s", "ddp", str(script)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in shown.splitlines() if " loaded " in line]
    loaded = line.split(" loaded ")[1].split()
    assert len(loaded) <= 170
    elsewhere = ("plan", "cluster", "server", "coordinator", "lab", "calibration", "commands")
    assert not [name for name in loaded if name.split(".")[1] in elsewhere]
