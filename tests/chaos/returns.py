"""Kill random workers again and again, which are started again: the run has to end by itself.

    python -m tests.chaos.returns [--count 3] [--seed 0] [--kills 5]

Workers are killed at random moments, also while they start, while they come back, and while all
of them evaluate or save. At least two others are alive at each kill, so the run has to succeed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos import read_numbers

STRATEGIES = ['ps(mode="async")', "hogwild", "ps", "ps(staleness=3)", 'gossip(mode="async")']
STRATEGIES += ["ps(quorum=0.5)", 'ps(mode="async", servers=2)']
WORKERS = 4
STEPS = 2400
HANGS_S = 400.0  # a run that takes longer
ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import time, torch, shoal
from functools import partial
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(96, 6, generator=generator), torch.arange(96) % 3)

def train(job):
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    step = job.step(net, torch.nn.functional.cross_entropy,
                    optimizer=partial(torch.optim.SGD, lr=0.05))
    open("begun", "w").close()
    for batch in job.batches(DATA, batch_size=24, epochs=10**6, steps={STEPS}):
        step(batch)
        time.sleep(0.02)
        if job.steps % 60 == 0:
            mean = job.evaluate(lambda outputs, targets: targets.double().mean(), DATA)
            assert abs(mean - 1.0) < 1e-9, mean
        if job.steps % 200 == 0:
            job.save("saved")
    job.print("finished after", job.steps)

shoal.run(train)
"""


def attack(strategy: str, kills: int, chance: random.Random, folder: Path) -> str:
    """How it ended: a few words; what begins with WRONG is a failure."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shoal", "run", "train.py", "-n", str(WORKERS)]
    command += ["-s", strategy, "--restart", str(kills)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    with (folder / "out").open("w") as out:
        launcher = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
    deadline_s = time.monotonic() + HANGS_S
    done = 0
    try:
        while launcher.poll() is None and time.monotonic() < deadline_s:
            time.sleep(chance.uniform(0.2, 4.0))
            may_kill = (folder / "begun").exists() or chance.random() < 0.1
            if done < kills and may_kill and _kill_one(launcher.pid, chance):
                done += 1
        if launcher.poll() is None:
            return f"WRONG: it hangs after {done} kills"
    finally:
        launcher.terminate()
        launcher.wait()
    said = (folder / "out").read_text()
    if launcher.returncode or "finished after" not in said:
        return f"WRONG: status {launcher.returncode} after {done} kills\n{said}"
    back = said.count("and came back after")
    return f"finished after {done} kills; {back} came back in time"


def _kill_one(launcher: int, chance: random.Random) -> bool:
    """Kill a worker, if two others live that have begun to train."""
    alive = _workers(launcher)
    if len(alive) < 3:
        return False
    with suppress(ProcessLookupError):
        os.kill(chance.choice(alive), signal.SIGKILL)
        return True
    return False


def _workers(launcher: int) -> list[int]:
    """The processes of workers that have not ended."""
    found = []
    for file in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in file.read_text().split():
            with suppress(OSError):
                is_worker = b"\0SHOAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if is_worker and state not in "ZX":
                    found.append(int(pid))
    return found


def main(words: list[str] | None = None) -> int:
    given = read_numbers(words, count=len(STRATEGIES), kills=5)
    chance = random.Random(given.seed)
    wrong = 0
    for number in range(given.count):
        strategy = STRATEGIES[number % len(STRATEGIES)]
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            outcome = attack(strategy, given.kills, chance, Path(folder))
        print(f"{strategy}: {outcome}", flush=True)
        wrong += outcome.startswith("WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
