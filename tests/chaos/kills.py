"""Kill and stop workers, servers and launchers at random moments, under all strategies.

    python -m tests.chaos.kills [--count 40] [--seed 0]      count kills, and a fifth as many stops

A run that is hit has to end by itself and name whom it lost, and it leaves no process; what is
left of its folder the next start removes. Where the strategy survives losses it may also finish.
Each run is a fork of one process that has loaded torch; the scripts are small.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from shoal.runtime.files import remove_abandoned
from shoal.runtime.waits import state_of
from shoal.strategy.strategy import as_strategy
from tests import forked
from tests.chaos import read_numbers
from tests.scripts import DEEP

STRATEGIES = [
    "ddp",
    'ddp(algorithm="ring")',
    "zero(1)",
    "zero(3)",
    "ps",
    "ps(quorum=0.5)",
    'ps(mode="async")',
    "ps(staleness=2)",
    'gossip(graph="ring")',
    'gossip(mode="async")',
    "localsgd(every=4)",
    "hogwild",
    "mapreduce",
    "pp(2)",
    "tp(2)",
    "ddp + pp(2)",
]
WORKERS = 4
HANGS_S = 90.0  # a run that takes longer
STOPPED_S = "2"
SCRIPT = DEEP.replace("epochs=2", "epochs=60")


class Attack:
    """One run in a folder of its own, which is hit once."""

    def __init__(self, folder: Path, strategy: str, chance: random.Random):
        self.folder = folder
        self.strategy = strategy
        self.chance = chance
        self.servers = as_strategy(strategy).servers(WORKERS)
        self.children: list[int] = []
        (folder / "train.py").write_text(SCRIPT)

    def run(self, number: signal.Signals) -> str:
        """How it ended: a few words; what begins with WRONG is a failure."""
        env = {**os.environ, "TMPDIR": str(self.folder)}
        env |= {"SHOAL_WAIT_NOTICE": "0.5", "SHOAL_WAIT_REPEAT": "5"}
        command = [sys.executable, "-m", "shoal", "run", str(self.folder / "train.py")]
        command += ["-n", str(WORKERS), "-s", self.strategy, "--timeout", STOPPED_S]
        with (self.folder / "out").open("w") as out:
            self.launcher = forked.Popen(command, env=env, stdout=out, stderr=out)
        try:
            self._wait_for_the_moment()
            target = self._hit(number)
            status = self._status()
            return self._judge(target, status)
        finally:
            self._clean_up()

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    def _wait_for_the_moment(self) -> None:
        """During the start, or between some steps of training."""
        start_s = time.monotonic()
        while len(self.children) < WORKERS + self.servers and self._is_running(start_s):
            self.children = _children(self.launcher.pid)
        if self.chance.random() < 0.7:
            while "step" not in self.output and self._is_running(start_s):
                time.sleep(0.01)
        time.sleep(self.chance.random())

    def _is_running(self, start_s: float) -> bool:
        return self.launcher.poll() is None and time.monotonic() - start_s < HANGS_S

    def _hit(self, number: signal.Signals) -> str:
        names = [f"server {index}" for index in range(self.servers)]
        names += [f"worker {rank}" for rank in range(WORKERS)]
        targets = dict(zip(names, self.children, strict=False))
        if number == signal.SIGKILL:
            targets["launcher"] = self.launcher.pid
        target = self.chance.choice(sorted(targets))
        if state_of(targets[target]) in ("", "Z"):
            return "no process"
        with suppress(ProcessLookupError):
            os.kill(targets[target], number)
        return target

    def _status(self) -> int | None:
        deadline_s = time.monotonic() + HANGS_S
        while time.monotonic() < deadline_s:
            if self.launcher.poll() is not None:
                return self.launcher.returncode
            time.sleep(0.02)
        return None

    def _judge(self, target: str, status: int | None) -> str:
        if status is None:
            return "WRONG: it hangs"
        left = [pid for pid in self.children if not _has_ended(pid)]
        if left:
            return f"WRONG: processes {left} are left"
        if target == "launcher":
            return "the launcher was killed" if self._leaves_nothing() else "WRONG: files are left"
        if list(self.folder.glob("shoal-*")):
            return "WRONG: files are left"
        if target == "no process":
            return "it had ended before"
        if f"{target} " not in self.output and f"rank {target[-1]}" not in self.output:
            return "it had finished before" if status == 0 else f"WRONG: {target} is not named"
        return "the loss was survived" if status == 0 else "the run ended"

    def _leaves_nothing(self) -> bool:
        tempfile.tempdir = str(self.folder)
        remove_abandoned()
        tempfile.tempdir = None
        return not list(self.folder.glob("shoal-*"))

    def _clean_up(self) -> None:
        for pid in [self.launcher.pid, *self.children]:
            if not _is_gone(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


def _children(pid: int) -> list[int]:
    """In the order in which they were started: servers, then workers."""
    with suppress(OSError):
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def _has_ended(pid: int) -> bool:
    deadline_s = time.monotonic() + 5
    while not _is_gone(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return _is_gone(pid)


def attack(name: str, number: signal.Signals, count: int, chance: random.Random) -> int:
    """Hit `count` runs; returns how many ended wrongly."""
    ends: Counter[str] = Counter()
    seconds: list[float] = []
    for index in range(count):
        strategy = STRATEGIES[index % len(STRATEGIES)]
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
            each = Attack(Path(folder), strategy, chance)
            end = each.run(number)
            if end.startswith("WRONG"):
                print(f"{name} {index}, {strategy}: {end}\n{each.output[-3000:]}", flush=True)
        seconds.append(time.monotonic() - start_s)
        ends[end.partition(" [")[0]] += 1
    words = ", ".join(f"{end}: {times}" for end, times in ends.most_common())
    longest = max(seconds, default=0.0)
    print(f"{name}: {count} runs ({words}); the longest took {longest:.1f} s", flush=True)
    return sum(times for end, times in ends.items() if end.startswith("WRONG"))


def main(words: list[str] | None = None) -> int:
    given = read_numbers(words, count=40)
    chance = random.Random(given.seed)
    wrong = attack("kills", signal.SIGKILL, given.count, chance)
    wrong += attack("stops", signal.SIGSTOP, given.count // 5, chance)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
