"""Seeds in several processes, each of which runs one at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

SEED_S = 600.0  # of real time: most take a tenth of a second, alone

Result = tuple[int, str, bool, str]  # seed, ending, whether it is good, what was said


def run_seeds(pipe: Connection, planted: str | None) -> None:
    """The work of a process: run the seeds that come, one at a time."""
    import gc

    import torch

    from tests.rehearse.faults.outcome import run
    from tests.rehearse.faults.planted import planted_mistake
    from tests.rehearse.faults.scenario import draw

    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is not looked through after each seed
    with planted_mistake(planted):
        while (seed := pipe.recv()) is not None:
            outcome = run(draw(seed))
            pipe.send((seed, outcome.ending, outcome.is_good, outcome.said))


class Runner:
    """A process, and the seed that it runs."""

    def __init__(self, planted: str | None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=run_seeds, args=(theirs, planted), daemon=True
        )
        self.process.start()
        theirs.close()
        self.seed: int | None = None
        self.until_s = 0.0

    def begin(self, seed: int | None) -> None:
        self.seed, self.until_s = seed, time.monotonic() + SEED_S
        self.pipe.send(seed)

    def result(self) -> Result | None:
        """Of its seed; None while it runs. A process that has ended or is stuck gives one, too."""
        assert self.seed is not None
        if self.pipe.poll():
            try:
                result: Result = self.pipe.recv()
                return result
            except (EOFError, OSError):
                self.process.join()
                return self.seed, "died", False, f"its process ended ({self.process.exitcode})"
        if time.monotonic() > self.until_s:
            return self.seed, "stuck", False, f"no end after {SEED_S:g} real seconds"
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_all(seeds: Iterable[int], processes: int, planted: str | None = None) -> Iterator[Result]:
    """Results in the order in which they come."""
    left = iter(seeds)
    runners: list[Runner] = []
    try:
        for seed in (each for _, each in zip(range(processes), left, strict=False)):
            runners.append(Runner(planted))
            runners[-1].begin(seed)
        while runners:
            wait([runner.pipe for runner in runners], 1.0)
            for runner in list(runners):
                result = runner.result()
                if result is None:
                    continue
                if result[1] in ("died", "stuck"):
                    runner.close()
                    runners.remove(runner)
                    runner = Runner(planted)
                    runners.append(runner)
                yield result
                seed = next(left, None)
                if seed is None:
                    runner.close()
                    runners.remove(runner)
                else:
                    runner.begin(seed)
    finally:
        for runner in runners:
            runner.close()
