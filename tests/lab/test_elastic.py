"""Elastic runs on the hosts of a lab, one of which is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.lab.design import LabDesign
from shoal.lab.lab import Lab, build_lab, remove_lab
from tests.namespaces import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.whole,
    pytest.mark.timeout(600),
]
NAME = f"elastic{os.getpid() % 100_000}"
SCRIPT = """
import hashlib, time
from functools import partial
from pathlib import Path
import torch, shoal
from torch import nn

def train(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(16 * 60, 16)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    step = job.step(model, nn.functional.cross_entropy, exact=True,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    for batch in job.batches(data, batch_size=16):
        step(batch)
        if job.steps == 5:
            print("at step 5", job.rank, flush=True)
        if job.size > 1:
            time.sleep(0.05)
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("bits", hashlib.sha256(bits).hexdigest()[:16], "replicas", job.replicas, flush=True)

if __name__ == "__main__":
    shoal.run(train)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield build_lab(LabDesign(NAME, 4, 2, 125e6))
    remove_lab(NAME)


def kill_host(lab: Lab) -> None:
    for pid in lab.hosts[0].namespace.pids():
        os.kill(pid, signal.SIGKILL)


def kill_worker(lab: Lab) -> None:
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in lab.hosts[0].namespace.pids()}
    workers = [pid for pid, file in commands.items() if b"train.py" in file.read_bytes()]
    os.kill(workers[0], signal.SIGKILL)


def cut_link(lab: Lab) -> None:
    lab.switches[0].ip("link", "set", "h0", "down")


@pytest.mark.parametrize("lose", [kill_worker, kill_host, cut_link])
def test_the_others_go_on_with_the_bits_of_one_worker(
    lab: Lab, tmp_path: Path, lose: object
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shoal = [sys.executable, "-m", "shoal", "run", "--on", f"lab://{NAME}"]
    alone = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    with subprocess.Popen(
        [*shoal, "-n", "4", "--elastic", "2:4", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if "at step 5 0" in line:
                lose(lab)  # type: ignore[operator]
    text = "".join(lines)
    assert run.returncode == 0, text
    wanted = re.findall("bits ([0-9a-f]+)", alone.stdout)
    assert re.findall("bits ([0-9a-f]+) replicas 3", text) == wanted * 3, text
    assert "finished by workers 1, 2 and 3, without worker 0" in text
