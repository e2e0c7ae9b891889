"""A worker loads what it uses: strategies, servers and the planner are found by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools, sys, torch, shoal

def train(job):
    step = job.step(
        torch.nn.Linear(4, 2),
        torch.nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))
    for batch in job.batches(data, 8):
        job.log(loss=step(batch))
    loaded = sorted(name for name in sys.modules if name.startswith("shoal."))
    job.print("loaded", *loaded)

shoal.run(train)
"""


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
