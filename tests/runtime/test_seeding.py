from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.runtime.config import RunConfig
from shoal.runtime.launched_worker import seed_python
from tests import forked
from tests.scripts import script

DRAW = "import shoal, random\nimport numpy\nprint(random.random(), numpy.random.rand())"
SCRIPT = script("""
import numpy, random

def train(job):
    drawn = [random.random(), numpy.random.rand(), float(torch.rand(()))]
    sys.stderr.write(f"drawn {drawn}\\n")
""")


def test_what_a_script_draws_before_shoal_run_is_the_same_on_every_worker() -> None:
    drawn = []
    for rank, seed in ((0, 3), (1, 3), (0, 4)):
        env = RunConfig.from_environment()
        config = RunConfig(rank=rank, size=2, seed=seed, environ=env.environ)
        command = [sys.executable, "-c", DRAW]
        drawn.append(subprocess.check_output(command, env=config.to_environment()))
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_seed_is_that_of_torch_too() -> None:
    drawn = []
    for _ in range(2):
        seed_python(3)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


@pytest.mark.whole
def test_what_a_training_function_draws_does_not_depend_on_the_worker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    drawn = set()
    for words in ([], ["-m", "shoal", "run"], ["-m", "shoal", "run", "-n", "2", "-s", "ddp"]):
        done = forked.run(
            [sys.executable, *words, str(tmp_path / "script.py")],
            capture_output=True,
            text=True,
            check=True,
        )
        drawn |= {
            line[line.index("drawn") :] for line in done.stderr.splitlines() if "drawn" in line
        }
    assert len(drawn) == 1
