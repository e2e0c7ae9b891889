"""A worker of `shoal eval`: calls the script's test function where the script would train.

python -m shoal.commands.eval_worker CHECKPOINT RESULT SCRIPT [ARGS]
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from shoal.commands.compare_worker import run_script
from shoal.errors import BadInput
from shoal.launch.rank.run import replaced_run, run
from shoal.launch.rank.worker import Train
from shoal.train.checkpoints.files import read_manifest
from shoal.train.job import Job

NAMES = ("evaluate", "test")  # of a function of (job, checkpoint), or of (job, checkpoint, about)


def main(argv: list[str]) -> None:
    checkpoint, result, *words = argv

    def test_and_exit(train: Train) -> None:
        def evaluate(job: Job) -> None:
            function = _test_function(train, words[0])
            given: list[Any] = [checkpoint]
            if len(inspect.signature(function).parameters) > 2:
                given.append(read_manifest(Path(checkpoint)).get("about") or {})
            found = function(job, *given)
            if job.rank == 0 and found is not None:
                metrics = found if isinstance(found, dict) else {"metric": found}
                numbers = {str(name): float(value) for name, value in metrics.items()}
                Path(result).write_text(json.dumps(numbers), encoding="utf-8")

        with replaced_run(None):
            run(evaluate)
        sys.exit(0)  # the rest of the script follows training

    run_script(words, test_and_exit)


def _test_function(train: Any, script: str) -> Any:
    known = getattr(inspect.unwrap(train), "__globals__", {})
    found = next((known[name] for name in NAMES if callable(known.get(name))), None)
    if found is None or len(inspect.signature(found).parameters) < 2:
        raise BadInput(
            f"{script} has no function evaluate(job, checkpoint) or test(job, checkpoint), which "
            "builds the model with job.step, calls job.load(checkpoint), and returns what "
            "job.evaluate returns"
        )
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
