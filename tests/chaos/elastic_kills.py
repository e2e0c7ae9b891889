"""Kill workers of elastic runs at random moments: the runs go on, and no bit changes.

    python -m tests.chaos.elastic_kills [-s 'zero(3)'] [--kills 20] [--seed 17]

    --lab                     on four hosts of a lab
    --at-once 3 --worker 0    worker 0, and two others at the same moment
    --newcomers               also while a worker that was started again is about to join
    --signal TERM             as a preemption of one worker does

For each sweep it prints how long the others took to the end of their next step. It fails where the
weights and the optimizer state are not those of one worker that was never disturbed, to the bit, or
where a sample was not trained once in each epoch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from shoal.lab.design import LabDesign
from shoal.lab.lab import build_lab, remove_lab
from tests.disturbed import Disturbances, DisturbedRun
from tests.namespaces import why_not

STEPS_FOR_EACH = 60  # disturbance
STRATEGIES = ["ddp", "zero(2)", "zero(3)"]


def own_runs(folder: str) -> dict[str, str]:
    """An environment whose runs `shoal stop` does not find elsewhere."""
    return {**os.environ, "TMPDIR": folder}


@cache
def undisturbed(recipe: str, steps: int) -> str:
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        run = DisturbedRun(Path(folder), (), steps=steps, recipe=recipe)
        run.alone(own_runs(folder))
        return run.bits()


def sweep(strategy: str, what: Disturbances, on: str | None = None, recipe: str = "tally") -> str:
    """A sentence about a run that was disturbed; it begins with WRONG where a bit has changed."""
    options = ["-s", strategy, "--elastic", "1:4", "--timeout", "20"]
    options += [] if on is None else ["--on", on]
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        steps = STEPS_FOR_EACH * (what.number * (1 + what.newcomers) + 1)
        run = DisturbedRun(Path(folder), options, steps=steps, recipe=recipe)
        run.run(what, own_runs(folder))
        same = run.bits() == undisturbed(recipe, run.steps)
        once = recipe != "tally" or run.trains_each_sample_once()
    words = f"{run.summary(what)}; bits {'equal' if same else 'NOT equal'}"
    if recipe == "tally":
        words += f"; each sample {'once' if once else 'NOT once'} in an epoch"
    return words if same and once else f"WRONG: {words}"


@contextmanager
def lab_of_four() -> Iterator[str]:
    name = f"kills{os.getpid() % 100_000}"
    build_lab(LabDesign(name, 4, 2, 125e6))
    try:
        yield f"lab://{name}"
    finally:
        remove_lab(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-s", "--strategy", action="append")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--newcomers", action="store_true")
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM"])
    parser.add_argument("--recipe", default="tally", choices=["tally", "gpt2", "bert", "resnet"])
    parser.add_argument("--lab", action="store_true")
    given = parser.parse_args()
    by = signal.Signals[f"SIG{given.signal}"]
    what = Disturbances(given.kills, given.seed, given.at_once, given.worker, given.newcomers, by)
    if given.lab and why_not():
        print(f"there is no lab: {why_not()}")
        return 0
    wrong = 0
    with lab_of_four() if given.lab else nullcontext(None) as on:
        for strategy in given.strategy or STRATEGIES:
            sentence = sweep(strategy, what, on, given.recipe)
            wrong += sentence.startswith("WRONG")
            print(sentence, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
