"""Elastic runs on the hosts of a lab, which are lost, and whose workers come back on others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal.lab.design import LabDesign
from shoal.lab.lab import Lab, build_lab, remove_lab
from shoal.train.checkpoints import files
from tests.chaos.elastic_kills import sweep
from tests.disturbed import Disturbances
from tests.namespaces import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.whole,
    pytest.mark.timeout(600),
]
NAME = f"elastic{os.getpid() % 100_000}"


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield build_lab(LabDesign(NAME, 4, 2, 125e6))
    remove_lab(NAME)


@pytest.fixture
def own_runs() -> Iterator[dict[str, str]]:
    """An environment in which `shoal join` finds no other runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield {**os.environ, "TMPDIR": folder}


def kill_host(lab: Lab, host: int = 0) -> None:
    for pid in lab.hosts[host].namespace.pids():
        os.kill(pid, signal.SIGKILL)


def kill_worker(lab: Lab, host: int = 0, number: int = signal.SIGKILL) -> None:
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in lab.hosts[host].namespace.pids()}
    workers = [pid for pid, file in commands.items() if b"train.py" in file.read_bytes()]
    os.kill(workers[0], number)


def cut_link(lab: Lab, host: int = 0) -> None:
    switch = lab.switches[lab.hosts[host].rack]
    switch.ip("link", "set", f"h{host}", "down")


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("lab")
def test_twenty_kills_at_random_moments_change_no_bit() -> None:
    said = sweep("ddp", Disturbances(), on=f"lab://{NAME}")
    print(said)
    assert not said.startswith("WRONG"), said


RETURNS = """
import os, sys, time
from functools import partial
import torch, shoal
from torch import nn

folder, is_exact, steps = sys.argv[1], sys.argv[2] == "exact", int(sys.argv[3])

class Tally(nn.Module):
    # With a learning rate of the batch size, each training of sample i takes 1 from weight i.
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(96))

    def forward(self, rows):
        return (rows @ self.counts).mean()

def train(job):
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    if is_exact:
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.2), nn.Linear(32, 3))
        step = job.step(model, nn.functional.cross_entropy, exact=True,
                        optimizer=partial(torch.optim.Adam, lr=0.01))
    else:
        data = torch.utils.data.TensorDataset(torch.eye(96))
        step = job.step(Tally(), optimizer=partial(torch.optim.SGD, lr=24))
    for batch in job.batches(data, batch_size=24, epochs=steps // 4):
        step(batch)
        if job.size > 1 and not os.path.exists(f"{folder}/enough"):
            print(f"step {job.steps} worker {job.rank} of {job.replicas}", flush=True)
            time.sleep(0.1)
    job.save(f"{folder}/saved")

if __name__ == "__main__":
    shoal.run(train)
"""
STEPS = 2000


class Changes:
    """What happens to a run: the next one when all workers have done steps since the last one."""

    def __init__(self, changes: list[Callable[[], object]], folder: Path, workers: int):
        self._left = changes
        self._folder = folder
        self._replicas = workers
        self._seen: dict[int, set[int]] = {}  # by step the workers of a full group
        self._since = 0

    def look(self, line: str) -> None:
        found = re.search(r"step (\d+) worker (\d+) of (\d+)", line)
        if found is None or (self._folder / "enough").exists():
            return
        step, worker, replicas = map(int, found.groups())
        if replicas != self._replicas:
            self._since = step + 1
        seen = self._seen.setdefault(step, set())
        seen.add(worker)
        if step >= self._since + 3 and len(seen) == self._replicas:
            self._change(step)

    def _change(self, step: int) -> None:
        self._since = step + 1_000_000  # until the group is another one
        self._replicas = 4
        if self._left:
            self._left.pop(0)()
        else:
            (self._folder / "enough").touch()


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero(2)", "zero(3)", "localsgd(every=4)", 'gossip(graph="complete")'],
)
def test_workers_join_and_come_back_on_their_host_and_on_others(
    lab: Lab, tmp_path: Path, strategy: str, own_runs: dict[str, str]
) -> None:
    """One joins, one is killed, one stopped, a host is killed, the link of another one is cut."""
    is_exact = strategy.startswith(("ddp", "zero"))
    script = ["train.py", "--", str(tmp_path), "exact" if is_exact else "tally", str(STEPS)]
    (tmp_path / "train.py").write_text(RETURNS)
    command = [sys.executable, "-m", "shoal", "run", "--on", f"lab://{NAME}", "-s", strategy]
    command += ["-n", "3", "--elastic", "2:4", "--restart", "9", "--timeout", "20", *script]
    changes = Changes(
        [
            partial(subprocess.run, [sys.executable, "-m", "shoal", "join"], env=own_runs),
            partial(kill_worker, lab, 1),
            partial(kill_worker, lab, 3, signal.SIGSTOP),  # and kill it after the timeout
            partial(kill_host, lab, 0),
            partial(cut_link, lab, 2),
        ],
        tmp_path,
        3,
    )
    with subprocess.Popen(
        command, cwd=tmp_path, env=own_runs,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            changes.look(line)
    text = "".join(lines)
    assert run.returncode == 0, text
    assert "worker 3 joined at step" in text
    for worker in range(4):
        assert re.search(rf"worker {worker} was lost at step \d+ and came back", text), text
    saved = files.read(tmp_path / "saved")
    if not is_exact:
        counts = -saved.model["0:counts"]
        torch.testing.assert_close(counts, torch.full_like(counts, STEPS // 4))
        return
    alone = ["train.py", str(tmp_path / "alone"), *script[3:]]
    subprocess.run([sys.executable, *alone], cwd=tmp_path, capture_output=True, check=True)
    wanted = files.read(tmp_path / "alone" / "saved")
    for name, tensor in {**wanted.model, **wanted.optimizer}.items():
        assert torch.equal({**saved.model, **saved.optimizer}[name], tensor), name
