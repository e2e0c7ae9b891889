"""Kill and stop workers, servers and launchers at random moments, under all strategies.

    python -m tests.chaos.kills [--count 40] [--seed 0] [--returns 7]

`count` runs are hit by a kill, a fifth as many by a stop. Such a run has to end by itself and name
whom it lost, and it leaves no process; what is left of its folder the next start removes. Where the
strategy survives losses it may also finish.

In `returns` further runs 5 workers are killed, which are started again; also while they start,
while they come back, and while all of them evaluate or save. At least two others are alive at each
kill, so the run has to succeed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.runtime.files import remove_abandoned
from shoal.runtime.waits import state_of
from shoal.strategy.strategy import as_strategy
from tests import forked
from tests.chaos import read_numbers
from tests.scripts import DEEP, script

STRATEGIES = [
    *("ddp", 'ddp(algorithm="ring")', "zero(1)", "zero(3)", "ps", "ps(quorum=0.5)"),
    *('ps(mode="async")', "ps(staleness=2)", 'gossip(graph="ring")', 'gossip(mode="async")'),
    *("localsgd(every=4)", "hogwild", "mapreduce", "pp(2)", "tp(2)", "ddp + pp(2)"),
    *("zero(1, shared_weights=True)", "gossip(shared_weights=True)"),
]
RETURNING = ['ps(mode="async")', "hogwild", "ps", "ps(staleness=3)", 'gossip(mode="async")']
RETURNING += ["ps(quorum=0.5)", 'ps(mode="async", servers=2)']
WORKERS = 4
HANGS_S = 400.0  # a run that takes longer
ENDING = DEEP.replace("epochs=2", "epochs=60")
LASTING = script("""
import time
data = TensorDataset(*(tensor[:96] for tensor in data.tensors))

def train(job):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    step = job.step(net, loss, optimizer=partial(torch.optim.SGD, lr=0.05))
    open("begun", "w").close()
    for batch in job.batches(data, batch_size=24, epochs=10**6, steps=2400):
        step(batch)
        time.sleep(0.02)
        if job.steps % 60 == 0:
            mean = job.evaluate(lambda outputs, targets: targets.double().mean(), data)
            assert abs(mean - data.tensors[1].double().mean()) < 1e-9, mean
        if job.steps % 200 == 0:
            job.save("saved")
    job.print("finished after", job.steps)
""")


class Attack:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, strategy: str, chance: random.Random):
        self.folder = folder
        self.strategy = strategy
        self.chance = chance
        self.servers = as_strategy(strategy).servers(WORKERS)
        self.children: list[int] = []

    def _start(self, script: str, *options: str) -> None:
        (self.folder / "train.py").write_text(script)
        env = {**os.environ, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        env |= {"SHOAL_WAIT_NOTICE": "0.5", "SHOAL_WAIT_REPEAT": "5", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "shoal", "run", "-n", str(WORKERS)]
        command += ["-s", self.strategy, *options, "train.py"]
        with (self.folder / "out").open("w") as out:
            self.launcher = forked.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=out)
        self.deadline_s = time.monotonic() + HANGS_S

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    def _is_running(self) -> bool:
        return self.launcher.poll() is None and time.monotonic() < self.deadline_s

    def _processes(self) -> list[int]:
        """In the order in which they were started: servers, then workers."""
        files = Path(f"/proc/{self.launcher.pid}/task").glob("*/children")
        with suppress(OSError):
            return [int(pid) for file in files for pid in file.read_text().split()]
        return []

    # ------------------------------------------------------------------ one is hit

    def hit(self, number: signal.Signals) -> str:
        """How it ended: a few words; what begins with WRONG is a failure."""
        self._start(ENDING, "--timeout", "2")
        try:
            while self._is_running() and len(self.children) < WORKERS + self.servers:
                self.children = self._processes()
            if self.chance.random() < 0.7:  # between some steps of training, else during the start
                while "step" not in self.output and self._is_running():
                    time.sleep(0.01)
            time.sleep(self.chance.random())
            names = [f"server {i}" for i in range(self.servers)]
            names += [f"worker {rank}" for rank in range(WORKERS)]
            targets = dict(zip(names, self.children, strict=False))
            if number == signal.SIGKILL:
                targets["launcher"] = self.launcher.pid
            target = self.chance.choice(sorted(targets))
            was_there = not _is_gone(targets[target])
            with suppress(ProcessLookupError):
                os.kill(targets[target], number)
            while self._is_running():
                time.sleep(0.02)
            return self._judge(target) if was_there else "it had ended before"
        finally:
            self._clean_up()

    def _judge(self, target: str) -> str:
        if self.launcher.poll() is None:
            return "WRONG: it hangs"
        left = [pid for pid in self.children if not _has_ended(pid)]
        if left:
            return f"WRONG: processes {left} are left"
        if target == "launcher":
            tempfile.tempdir = str(self.folder)
            remove_abandoned()
            tempfile.tempdir = None
        if list(self.folder.glob("shoal-*")):
            return "WRONG: files are left"
        if target == "launcher":
            return "the launcher was killed"
        if f"{target} " not in self.output and f"rank {target[-1]}" not in self.output:
            has_finished = self.launcher.returncode == 0
            return "it had finished before" if has_finished else f"WRONG: {target} is not named"
        return "the loss was survived" if self.launcher.returncode == 0 else "the run ended"

    def _clean_up(self) -> None:
        for pid in [self.launcher.pid, *self.children]:
            if not _is_gone(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.launcher.wait()

    # ------------------------------------------------------------------ workers come back

    def kill_returning(self, kills: int = 5) -> str:
        """The same, where workers are killed again and again."""
        self._start(LASTING, "--restart", str(kills))
        done = 0
        try:
            while self._is_running():
                time.sleep(self.chance.uniform(0.2, 4.0))
                may_kill = (self.folder / "begun").exists() or self.chance.random() < 0.1
                alive = [pid for pid in self._processes()[self.servers :] if not _is_gone(pid)]
                if done < kills and may_kill and len(alive) > 2:
                    with suppress(ProcessLookupError):
                        os.kill(self.chance.choice(alive), signal.SIGKILL)
                        done += 1
            if self.launcher.poll() is None:
                return f"WRONG: it hangs after {done} kills"
        finally:
            self.launcher.terminate()
            self.launcher.wait()
        if self.launcher.returncode or "finished after" not in self.output:
            return f"WRONG: status {self.launcher.returncode} after {done} kills"
        back = self.output.count("and came back after")
        return f"finished after {done} kills; {back} came back in time"


def _is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def _has_ended(pid: int) -> bool:
    deadline_s = time.monotonic() + 5
    while not _is_gone(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return _is_gone(pid)


def attack(
    name: str, act: Callable[[Attack], str], strategies: list[str], chance: random.Random
) -> int:
    """A run under each of these strategies; returns how many ended wrongly."""
    ends: Counter[str] = Counter()
    start_s = time.monotonic()
    for strategy in strategies:
        with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
            each = Attack(Path(folder), strategy, chance)
            end = act(each)
            if end.startswith("WRONG"):
                print(f"{name}, {strategy}: {end}\n{each.output[-3000:]}", flush=True)
        ends[end] += 1
    words = ", ".join(f"{end}: {times}" for end, times in ends.most_common())
    print(f"{name}: {words}; {time.monotonic() - start_s:.1f} s", flush=True)
    return sum(times for end, times in ends.items() if end.startswith("WRONG"))


def hit_all(count: int, number: signal.Signals, chance: random.Random) -> int:
    strategies = [STRATEGIES[i % len(STRATEGIES)] for i in range(count)]
    return attack(number.name, lambda each: each.hit(number), strategies, chance)


def main(words: list[str] | None = None) -> int:
    given = read_numbers(words, count=40, returns=len(RETURNING))
    chance = random.Random(given.seed)
    wrong = hit_all(given.count, signal.SIGKILL, chance)
    wrong += hit_all(given.count // 5, signal.SIGSTOP, chance)
    wrong += attack("returns", Attack.kill_returning, RETURNING[: given.returns], chance)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
