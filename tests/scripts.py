"""Scripts as users write them, for tests that start processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import forked

HEAD = """
from functools import partial
import os, sys
import torch, shoal
from torch import nn
from torch.utils.data import TensorDataset

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(103, 6, generator=g), torch.randint(0, 3, (103,), generator=g))
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
loss = nn.functional.cross_entropy
"""


def script(body: str) -> str:
    """`body` defines `train`."""
    return f'{HEAD}\n{body}\nif __name__ == "__main__":\n    shoal.run(train)\n'


PLAIN = script("""
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=2):
        job.log(loss=step(batch))
""")

# enough layers for four stages of two chunks; clipped, with AdamW
DEEP = script("""
def deep():
    torch.manual_seed(0)
    widths = [6, 20, 16, 18, 14, 16, 12, 18, 3]
    pairs = zip(widths, widths[1:])
    layers = [m for a, b in pairs for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])

def train(job):
    step = job.step(
        deep(),
        loss,
        optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        clip_norm=0.05,
    )
    for batch in job.batches(data, batch_size=24, epochs=2):
        job.log(loss=step(batch))
""")

BROKEN_REDUCTION = PLAIN.replace(
    "if __name__",
    """
from shoal.sync.ddp import DdpSync
finish = DdpSync.finish
def too_much(self):  # doubles the gradient of the last layer's bias before it is used
    piece = self.flat.ranges[-1]
    for work in self._under_way: work.wait()
    self._under_way.clear()
    self.flat.grads.buffer[piece.start:piece.stop] *= 2
    finish(self)
DdpSync.finish = too_much

if __name__""",
)

FAILS_ON_RANK_1 = script("""
def helper_that_fails():
    raise ValueError("the seventh seal is broken")

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=50):
        step(batch)
        if job.steps == 3 and job.rank == 1:
            helper_that_fails()
""")

SAVES = script("""
def train(job):
    step = job.step(model(), loss, optimizer=partial(torch.optim.AdamW, lr=0.01))
    if "--resume" in sys.argv:
        job.load("checkpoint")
    for batch in job.batches(data, batch_size=20, epochs=3):
        value = step(batch)
        if job.steps % 4 == 0:
            job.save("checkpoint")
        if "--die" in sys.argv and job.steps == 7:
            os.kill(os.getpid(), 9)
    job.print(f"last loss {float(value):.9f} after {job.steps} steps")
""")


def shoal(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    return _run(forked.run, *words, cwd=cwd, **env)


def started(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The same in new interpreters, where a fork of one that has loaded torch would differ."""
    return _run(subprocess.run, *words, cwd=cwd, **env)


def _run(run: Any, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    command = [sys.executable, "-m", "shoal", *words]
    done: subprocess.CompletedProcess[str] = run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=100
    )
    return done


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The one JSON document on stdout."""
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document
