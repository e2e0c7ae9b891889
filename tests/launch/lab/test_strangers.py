"""Processes of another host without the key of a run: they do not join, read or disturb."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.launch.lab.design import LabDesign
from shoal.launch.lab.lab import build_lab, remove_lab
from tests.cluster import pieces_of
from tests.launch.lab.attacked import ATTACKS, AttackedLab, Stranger
from tests.namespaces import why_not

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
]
NAME = f"keys{os.getpid() % 100_000}"
SCRIPT = """
import hashlib, sys, time
from functools import partial
from pathlib import Path
import torch, shoal
from torch import nn

def train(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(16 * int(sys.argv[1]), 16)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    step = job.step(model, nn.functional.cross_entropy, exact=True,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    seen = []
    for batch in job.batches(data, batch_size=16):
        loss = float(step(batch))
        if job.steps % 10 == 0:
            seen.append(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
            print(f"step {job.steps} loss {loss.hex()}", flush=True)
        if job.size > 1:
            time.sleep(0.5 if job.replicas == 1 else 0.05)
    if job.rank == 0:
        Path("weights").write_bytes(b"".join(seen))
    print("bits", hashlib.sha256(seen[-1]).hexdigest()[:16], "replicas", job.replicas, flush=True)

if __name__ == "__main__":
    shoal.run(train)
"""


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[AttackedLab]:
    (tmp_path / "train.py").write_text(SCRIPT)
    yield AttackedLab(build_lab(LabDesign(NAME, 3, 1, 125e6)), tmp_path)
    remove_lab(NAME)


def results(text: str) -> list[str]:
    """Losses and bits of every worker; without the ranks, whose lines come in any order."""
    return sorted(re.findall(r"(step \d+ loss \S+|bits [0-9a-f]+ replicas \d+)", text))


def assert_kept_out(attacked: AttackedLab, stranger: Stranger) -> None:
    weights = (attacked.folder / "weights").read_bytes()
    received = b"\n".join(stranger.received)
    assert stranger.let_in == []
    assert stranger.tried.keys() >= {attack.__name__ for attack in ATTACKS}
    assert stranger.tried["silence"] > 100
    assert received, "it was greeted, at least"
    assert not any(piece in received for piece in pieces_of(attacked.secret))
    for start in range(0, len(weights), 16):
        assert weights[start : start + 16] not in received


@pytest.mark.parametrize("strategy", ["ddp", "ps(servers=2)", "ps(servers=2, replicas=2)"])
def test_a_run_among_strangers_has_the_bits_of_one_alone(
    attacked: AttackedLab, strategy: str
) -> None:
    words = ("-n", "2", "-s", strategy, "train.py", "60")
    with attacked.recorded():
        alone = attacked.run(*words)
    assert "exit status 0" in alone, alone
    with attacked.stranger() as stranger:
        among = attacked.run(*words)
    assert "exit status 0" in among, among
    assert results(among) == results(alone) != []
    assert_kept_out(attacked, stranger)
    assert len(among.splitlines()) < len(alone.splitlines()) + 10, among


def test_a_worker_joins_an_elastic_run_among_strangers(attacked: AttackedLab) -> None:
    words = ("-n", "2", "--elastic", "1:2", "--start", "1", "train.py", "200")
    alone = subprocess.run(
        [sys.executable, "train.py", "200"], cwd=attacked.folder, capture_output=True, text=True
    ).stdout
    asked: list[threading.Thread] = []

    def ask(line: str) -> None:
        if "step 10 " in line and not asked:
            asked.append(threading.Thread(target=attacked.join))
            asked[0].start()

    with attacked.recorded():
        assert "exit status 0" in attacked.run("-n", "2", "--elastic", "1:2", "train.py", "20")
    with attacked.stranger() as stranger:
        among = attacked.run(*words, on_line=ask)
    asked[0].join()
    assert "exit status 0" in among, among
    bits = re.findall("bits [0-9a-f]+", alone)
    assert re.findall("bits [0-9a-f]+", among) == bits * 2, among
    assert re.findall("replicas [0-9]+", among) == ["replicas 2"] * 2, among
    assert_kept_out(attacked, stranger)
