"""A script that is struck once after its 30th step, and the loss that it has without that.

With `exact` the loss has the same bits at any number of workers, so one process tells it.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests import forked
from tests.launch.helpers import ROOT
from tests.scripts import HEAD

SCRIPT = (
    HEAD
    + """
import signal, time

is_first_start = not os.path.exists("struck")

def strike(job, what, rank, pause_s="0.05"):
    '''After step 30: a signal to this rank, to its parent or to both, or a file.'''
    if job.steps == 30 and rank in ("any", str(job.rank)):
        open("struck", "w").close()
        target, name = what.split("-")
        if target == "file":
            open(name, "w").close()
        if target in ("parent", "both"):
            os.kill(os.getppid(), getattr(signal, name))
        if target in ("rank", "both"):
            os.kill(os.getpid(), getattr(signal, name))
    if os.path.exists("struck"):
        time.sleep(float(pause_s))  # so that it does not end before the signal is heard

def train(job):
    step = job.step(model(), loss, optimizer=sgd, exact=True)
    for batch in job.batches(data, batch_size=20, epochs=50):
        value = step(batch)
        if is_first_start and sys.argv[1:]:
            strike(job, *sys.argv[1:])
    job.print("final", float(value), job.size)

if __name__ == "__main__":
    shoal.run(train)
"""
)
CHECKPOINT = "saved:every=7"


def write_script(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)


def environ(**others: str) -> dict[str, str]:
    """Variables of a script that saves in `saved` every 7 steps."""
    saves = {"SHOAL_CHECKPOINT": "saved", "SHOAL_CHECKPOINT_EVERY": "7"}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **saves, **others}


def undisturbed(folder: Path) -> float:
    """The last loss of one process."""
    write_script(folder)
    command = [sys.executable, "train.py"]
    done = forked.run(command, cwd=folder, env=environ(), capture_output=True, text=True)
    return final(done, 1)


def final(done: subprocess.CompletedProcess[str], workers: int) -> float:
    """The last loss of a run that has succeeded, with so many workers at its end."""
    found = re.search(rf"final (\S+) {workers}$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stderr
    return float(found[1])


def free_port() -> int:
    """Below those that the kernel gives out: no other process takes it meanwhile."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(end // 2, end)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port
