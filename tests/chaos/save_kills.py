"""Kill savers of one checkpoint while others save and read it.

    python -m tests.chaos.save_kills [--count 200] [--seed 0]      count kills

In each round three processes save at one path without a pause, two of them in the background as
`job.save(wait=False)` does, and two read it, until the savers are killed at random moments. Every
read gives one whole version; so does the folder after the kills; and the next save leaves nothing
but its own files.
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
from functools import partial
from pathlib import Path

import torch

from shoal.runtime.background_writer import BackgroundWriter
from shoal.train.checkpoints import files
from shoal.train.checkpoints.files import Checkpoint
from tests.chaos import read_numbers

SAVERS = 3
READERS = 2
NUMBERS = 50_000
LONGEST_S = 0.03  # until a saver is killed


def version(number: int) -> Checkpoint:
    """A checkpoint whose tensors and manifest say `number`."""
    tensor = torch.full((NUMBERS,), float(number))
    document = {"steps": number, "batches": number}
    return Checkpoint({"w": tensor}, {"w/m": tensor.clone()}, document)


def check_whole(path: Path) -> int:
    """The number of the version at `path`; all of it has to say the same."""
    saved = files.read(path)
    number: int = saved.document["steps"]
    for tensor in (saved.model["w"], saved.optimizer["w/m"]):
        if not torch.equal(tensor, torch.full((NUMBERS,), float(number))):
            raise AssertionError(f"the version of {number} holds other numbers")
    return number


def fork(body: Callable[[], None]) -> int:
    """A process that runs `body`, and exits with 1 if that fails."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        body()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(status)


class Round:
    """Savers and readers at one path."""

    def __init__(self, path: Path, number: int):
        self.path = path
        self.number = number
        self.begun, self._begin = os.pipe()
        self.reads, self._read = os.pipe()
        self.until, self._stop = os.pipe()
        self.savers = [fork(lambda s=s: self._save(s)) for s in range(SAVERS)]  # type: ignore[misc]
        self.readers = [fork(self._keep_reading) for _ in range(READERS)]

    def _save(self, saver: int) -> None:
        step = 1000 * self.number + 100 * saver
        writer = BackgroundWriter()
        while True:
            os.write(self._begin, b".")
            checkpoint = version(step)
            writer.wait()
            writer.start(partial(files.write, self.path, checkpoint))
            if saver == 0:
                writer.wait()
            step += 1

    def _keep_reading(self) -> None:
        os.set_blocking(self.until, False)
        os.close(self._stop)
        while True:
            check_whole(self.path)
            os.write(self._read, b".")
            try:
                os.read(self.until, 1)
            except BlockingIOError:
                continue
            return  # the other end is closed

    def kill(self, savers: int, chance: random.Random) -> None:
        """After all of them have begun; the last ones are killed, too, and not counted."""
        os.read(self.begun, SAVERS)
        for i, saver in enumerate(self.savers):
            if i < savers:
                time.sleep(chance.uniform(0.0, LONGEST_S))
            os.kill(saver, signal.SIGKILL)
            os.waitpid(saver, 0)

    def end(self) -> tuple[int, int]:
        """The number of reads, and of readers that failed."""
        os.close(self._stop)
        failed = sum(os.waitpid(reader, 0)[1] != 0 for reader in self.readers)
        os.close(self._read)
        reads = 0
        while data := os.read(self.reads, 1 << 16):
            reads += len(data)
        for descriptor in (self.begun, self._begin, self.reads, self.until):
            os.close(descriptor)
        return reads, failed


def attack(path: Path, number: int, kills: int, chance: random.Random) -> Counter[str]:
    """One round; what was seen."""
    seen: Counter[str] = Counter(kills=kills)
    files.write(path, version(number))
    round_ = Round(path, number)
    round_.kill(kills, chance)
    seen["reads"], seen["reads that failed"] = round_.end()
    seen["folders with leftovers of kills"] = len(list(path.iterdir())) > 3
    try:
        check_whole(path)
    except (AssertionError, files.CheckpointError) as error:
        print(f"after the kills: {error}")
        seen["checkpoints that are not whole"] += 1
    files.write(path, version(number))
    left = sorted(file.name for file in path.iterdir())
    if len(left) != 3 or check_whole(path) != number:
        print(f"after the next save: {left}")
        seen["folders with something left after the next save"] += 1
    return seen


def main(words: list[str] | None = None) -> int:
    options = read_numbers(words, count=200)
    chance = random.Random(options.seed)
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while total["kills"] < options.count:
            number += 1
            kills = min(SAVERS, options.count - total["kills"])
            total += attack(Path(folder) / "model", number, kills, chance)
    bad = ("reads that failed", "checkpoints that are not whole")
    wrong = sum(total[name] for name in (*bad, "folders with something left after the next save"))
    told = ", ".join(f"{count} {name}" for name, count in total.items())
    print(f"kills during saves: {told}; {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
