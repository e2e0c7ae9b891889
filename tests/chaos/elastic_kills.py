"""Kill workers of elastic runs at random moments: the runs go on, and no bit changes.

    python -m tests.chaos.elastic_kills [--count 20] [--seed 17]      count kills in each run

It prints how long the others took to the end of their next step. It fails where the weights and the
optimizer state are not those of one worker that was never disturbed, to the bit, or where a sample
was not trained once in each epoch.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.chaos import read_numbers
from tests.disturbed import DisturbedRun

STEPS_FOR_EACH = 60  # kill
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


def sweep(strategy: str, kills: int = 20, seed: int = 17, on: str | None = None) -> str:
    """A sentence about a run that was disturbed; it begins with WRONG where a bit has changed."""
    options = ["-s", strategy, "--elastic", "1:4", "--timeout", "20"]
    options += [] if on is None else ["--on", on]
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        run = DisturbedRun(Path(folder), options, steps=STEPS_FOR_EACH * (kills + 1))
        run.kill_often(kills, seed, own_runs(folder))
        same = run.bits() == undisturbed("tally", run.steps)
        once = run.trains_each_sample_once()
    words = f"{strategy}, {kills} kills (seed {seed}): the next step had ended after "
    words += f"{statistics.median(run.waits_s):.2f} s (median), {max(run.waits_s):.2f} s at most; "
    words += f"bits {'equal' if same else 'NOT equal'}; "
    words += f"each sample {'once' if once else 'NOT once'} in an epoch"
    return words if same and once else f"WRONG: {words}"


def main(words: list[str] | None = None) -> int:
    given = read_numbers(words, count=20, seed=17)
    wrong = 0
    for strategy in STRATEGIES:
        sentence = sweep(strategy, given.count, given.seed)
        wrong += sentence.startswith("WRONG")
        print(sentence, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
