"""`shoal run` on the nodes of a Ray cluster, for tests."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.ray_nodes import RayNodes
from tests.server.coordinator.helpers import until

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'shoal[ray]'"
)
SCRIPT = """
import hashlib, os, time, torch, shoal
from functools import partial
from torch import nn

def train(job):
    torch.manual_seed(1)
    width = int(os.environ.get("WIDTH", "32"))
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 3)]
    x = torch.randn(240, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(*layers)
    step = job.step(model, nn.functional.cross_entropy, exact="EXACT" in os.environ,
                    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    losses = []
    is_first = os.environ.get("SHOAL_INCARNATION", "0") == "0"
    pause = float(os.environ.get("PAUSE", "0")) if is_first else 0
    was_less = False
    data = torch.utils.data.TensorDataset(x, y)
    if os.path.exists("model") and "EXACT" not in os.environ:  # one that joins has all from others
        job.load("model")
    for _ in range(int(os.environ.get("EPOCHS", "2"))):
        for batch in job.batches(data, 24):
            losses.append(float(step(batch)))
            if len(losses) == 1:
                print("training", os.getpid(), flush=True)
            time.sleep(pause)
            is_less = job.replicas < job.size
            pause = 0 if was_less and not is_less else pause  # a lost worker is back
            was_less = is_less
        job.save("model")
        print("saved", flush=True)
    with step.sync.full_weights():
        data = step.flat.data.numpy().tobytes()
        print("bits", hashlib.sha256(data).hexdigest()[:16], flush=True)
    if job.rank == 0:
        print("losses", losses, flush=True)

shoal.run(train)
"""


def start(
    folder: Path,
    nodes: RayNodes | None,
    *arguments: str,
    workers: int = 4,
    script: str = SCRIPT,
    script_file: str = "train.py",
    script_arguments: Sequence[str] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    """`shoal run` on the nodes, or on this host."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    on = [] if nodes is None else ["--on", f"ray://{nodes.address}"]
    command = [sys.executable, "-m", "shoal", "run", *on, "-n", str(workers), *arguments]
    own = {} if nodes is None else nodes.variables
    environ = {**os.environ, **own, "SHOAL_TRUSTED_NETWORK": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, script_file, *script_arguments],
        cwd=folder,
        env={**environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(output: str) -> list[float]:
    line = next(line for line in output.splitlines() if "losses" in line)
    values: list[float] = ast.literal_eval(line.partition("losses ")[2])
    return values


def lines_until(process: subprocess.Popen[str], word: str, count: int = 4) -> list[str]:
    """Until all workers have printed it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(word in line for line in lines) == count:
            return lines
    raise AssertionError(f"the run has ended:\n{''.join(lines)}")


def node_of(lines: list[str], prefix: str) -> str:
    """The first digits of the id of the node on which a process is."""
    line = next(line for line in lines if line.startswith(f"[{prefix} "))
    return line.split("]")[0].rpartition("-")[2]


def assert_ours(output: str) -> None:
    """Neither Ray nor Python has printed anything."""
    ours = re.compile(r"shoal: |\[(\d+|server \d+|coordinator) \S+\] ")
    others = [line for line in output.splitlines() if not ours.match(line)]
    assert not others, "\n".join(others)


def nothing_is_left(nodes: RayNodes) -> None:
    empty = {"actors": 0, "groups": 0}
    until(lambda: nodes.state() == empty, "Ray has no actor and no placement group")


def ended(process: subprocess.Popen[str], nodes: RayNodes, lines: Sequence[str] = ()) -> str:
    """The output of a run that has succeeded, and of which nothing is left on the nodes."""
    output = "".join(lines) + process.communicate()[0]
    assert process.returncode == 0, output
    assert_ours(output)
    nothing_is_left(nodes)
    return output
