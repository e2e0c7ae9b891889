"""The script of elastic runs that are disturbed: it notes in a folder where each worker is.

    shoal run tests/elastic_train.py -n 4 -s 'zero(2, elastic=True)' -- FOLDER STEPS RECIPE [WAITS]

Files of the folder: `log` (time, worker, step, and the processes of the group, a line for each step
of a worker), `process-N` (process id, incarnation), `saved`. Until there is `enough`, steps of
several workers are slow, so that there is time to disturb them. After step WAITS they wait until a
worker has come later.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import shoal
from shoal.runtime.config import RunConfig
from tests.elastic_recipes import RECIPES

PAUSE_S = 0.05
LONG_PAUSE_S = 0.5  # in the second half of the steps, and while a worker is away


def train(job: shoal.Job) -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    recipe = RECIPES[sys.argv[3]]()
    step = job.step(recipe.model, recipe.loss, **recipe.options)
    ema = job.ema(recipe.model, 0.9) if recipe.averages else None
    incarnation = RunConfig.from_environment().incarnation
    _write(folder / f"process-{job.rank}", f"{os.getpid()} {incarnation}")
    if incarnation:
        (folder / "late").touch()
    for batch in job.batches(recipe.data, recipe.batch_size, epochs=steps, steps=steps):
        job.log(loss=step(batch))
        if ema is not None:
            ema.update()
        if job.size > 1:
            _note(job, folder)
            _wait(folder, is_long=job.replicas < job.size or job.steps > steps // 2)
            while sys.argv[4:] == [str(job.steps)] and not (folder / "late").exists():
                time.sleep(0.01)
    job.save(folder / "saved")


def _note(job: shoal.Job, folder: Path) -> None:
    """What was done, in one write."""
    assert job._elastic is not None
    members = job._elastic.group.membership.generation.members
    processes = ",".join(f"{worker}.{incarnation}" for worker, incarnation in members)
    with (folder / "log").open("a") as file:
        file.write(f"{time.monotonic()} {job.rank} {job.steps} {processes}\n")


def _wait(folder: Path, is_long: bool) -> None:
    if not (folder / "enough").exists():
        time.sleep(LONG_PAUSE_S if is_long else PAUSE_S)


def _write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


if __name__ == "__main__":
    shoal.run(train)
