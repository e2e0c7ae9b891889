"""Kill workers that share their weights: what they had saved is a whole step, and no memory stays.

    python -m tests.chaos.shared_kills [--count 12] [--seed 0]

A run saves after every step, and one worker or the launcher is killed at a random moment. Its
checkpoint then holds, bit by bit, what an undisturbed run has after that step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from shoal.runtime.waits import state_of
from shoal.train.checkpoints import files
from tests import forked
from tests.chaos import read_numbers
from tests.scripts import script

STRATEGIES = [
    *("ddp(shared_weights=True)", "zero(2, shared_weights=True)", "gossip(shared_weights=True)"),
    *('mapreduce(batch="mini", shared_weights=True)', "ddp(shared_weights=True) + pp(2)"),
]
WORKERS = 4
STEPS = 40
HANGS_S = 120.0
SAVING = script(f"""
from pathlib import Path

def train(job):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    step = job.step(net, loss, optimizer=partial(torch.optim.AdamW, lr=0.01), clip_norm=0.5)
    for batch in job.batches(data, batch_size=24, epochs=10**6, steps={STEPS}):
        step(batch)
        job.save("saved" if Path("attacked").exists() else f"at/{{job.steps}}")
""")


def start(folder: Path, strategy: str) -> forked.Popen:
    (folder / "train.py").write_text(SAVING)
    env = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "shoal", "run", "-n", str(WORKERS), "-s", strategy]
    with (folder / "out").open("w") as out:
        return forked.Popen(
            [*command, "--timeout", "2", "train.py"], cwd=folder, env=env, stdout=out, stderr=out
        )


def finished(run: forked.Popen) -> bool:
    deadline_s = time.monotonic() + HANGS_S
    while run.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return run.poll() is not None


def workers_of(run: forked.Popen) -> list[int]:
    found = Path(f"/proc/{run.pid}/task").glob("*/children")
    with suppress(OSError):
        return [int(pid) for file in found for pid in file.read_text().split()]
    return []


def maps_weights(pid: int) -> bool:
    with suppress(OSError):
        return "memfd:shoal-weights" in Path(f"/proc/{pid}/maps").read_text()
    return False


def hit(folder: Path, strategy: str, undisturbed: Path, chance: random.Random) -> str:
    """How it ended; what begins with WRONG is a failure."""
    folder.mkdir()
    (folder / "attacked").touch()
    run = start(folder, strategy)
    while not (folder / "saved").exists() and run.poll() is None:
        time.sleep(0.005)
    time.sleep(chance.uniform(0.0, 0.5))
    children = workers_of(run)
    target = chance.choice([*children, run.pid])
    with suppress(ProcessLookupError):
        os.kill(target, signal.SIGKILL)
    has_ended = finished(run)
    deadline_s = time.monotonic() + 5
    while any(state_of(pid) not in ("", "Z", "X") for pid in children):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    left = [pid for pid in children if state_of(pid) not in ("", "Z", "X") or maps_weights(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if not has_ended or left:
        return f"WRONG: it hangs: {not has_ended}; processes {left} are left"
    saved = files.read(folder / "saved")
    expected = files.read(undisturbed / "at" / str(saved.document["steps"]))
    for name in ("model", "optimizer"):
        found, wanted = getattr(saved, name), getattr(expected, name)
        if found.keys() != wanted.keys() or not all(
            map(torch.equal, found.values(), wanted.values())
        ):
            return f"WRONG: the {name} of step {saved.document['steps']} is torn"
    return "the checkpoint is whole"


def main(words: list[str] | None = None) -> int:
    given = read_numbers(words, count=2 * len(STRATEGIES))
    chance = random.Random(given.seed)
    before = set(os.listdir("/dev/shm"))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        for number in range(given.count):
            strategy = STRATEGIES[number % len(STRATEGIES)]
            undisturbed = Path(folder) / f"undisturbed-{number % len(STRATEGIES)}"
            if number < len(STRATEGIES):
                undisturbed.mkdir()
                first = start(undisturbed, strategy)
                if not finished(first) or first.returncode:
                    print((undisturbed / "out").read_text())
                    return 1
            end = hit(Path(folder) / str(number), strategy, undisturbed, chance)
            wrong += end.startswith("WRONG")
            print(f"{strategy}: {end}", flush=True)
    left = set(os.listdir("/dev/shm")) - before
    print(f"{given.count} kills, {wrong} wrong; left in /dev/shm: {sorted(left)}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
