"""A worker of `shoal compare` and `shoal eval`: a script whose training function they call.

    python -m shoal.commands.script_worker compare PLAN SCRIPT [ARGS]
    python -m shoal.commands.script_worker eval CHECKPOINT RESULT SCRIPT [ARGS]

The script runs up to its call of `shoal.run`. For `eval` its test function is called there. For
`compare` its training function is run under one strategy after the other: starting Python and torch
takes longer than a short run, so the processes are started once. A run that the strategy or the
script refuses is noted, and the next one follows; any other error ends the process, and `shoal
compare` continues without that run.
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.observe.comparison import ComparedRun, patience_s, sent_bytes
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import INJECTED
from shoal.runtime.waits import Backoff
from shoal.runtime.wording import counted
from shoal.strategy.strategy import as_strategy
from shoal.train.checkpoints.files import read_manifest
from shoal.train.job import Job
from shoal.train.progress import open_progress
from shoal.train.step.step import Step
from shoal.train.throughput import StepRecord
from shoal.worker.environment import Placement, detect
from shoal.worker.run import replaced_run, run
from shoal.worker.worker import Train, Worker


class ComparisonWorker(Worker):
    """One of many runs of a process: writes its report to a folder of its own."""

    def __init__(
        self,
        entry: ComparedRun,
        placement: Placement,
        steps: Any,
        models: set[Any],
        most_s: float | None,
        slow_links: dict[str, float],
    ):
        """`most_s`: a run that takes longer fails; `slow_links`: seconds a byte, by rank."""
        folder = Path(entry.folder)
        traces = folder if entry.traced else None
        config = replace(RunConfig.from_environment(), progress_fd=None, trace_dir=traces)
        has_faults = not entry.is_clean and entry.strategy != "single"
        if not has_faults:
            config = replace(config, slow=(), kill=())
        super().__init__(as_strategy(entry.strategy), placement, config, entry.number)
        self.reports = RunDir(folder)
        self.steps = entry.steps or steps
        self._models = models
        self._entry = entry
        self._link_s_per_byte = slow_links.get(str(placement.rank), 0.0) if has_faults else 0.0
        self._paced = 0.0  # bytes that a slow link has carried
        self._most_s = most_s
        self._start_s = time.monotonic()
        self._sent = self._done = 0

    def run(self, train: Train) -> Any:
        """Also a step that never ends is stopped: it leaves the timer's thread to say so."""
        timer = threading.Timer(self._most_s or threading.TIMEOUT_MAX, self._stop)
        timer.daemon = True
        timer.start()
        try:
            return super().run(train)
        finally:
            timer.cancel()

    def prepare(self, job: Job) -> None:
        job.checkpoints.dry = True
        job.on_build.append(self._check_model)
        self._steps = StepRecord(job)
        job.on_step.append(self._note)
        if self.steps is not None:
            job.stop_after(self.steps)

    def report(self, job: Job) -> None:
        if job.checkpoints.is_preempted:
            return  # a run that a signal has cut short has no result
        found = job.report() | self._steps.report(0)
        found |= {"losses": self._steps.values(), "group_bytes": self._sent}
        found["wall_s"] = time.monotonic() - self._start_s
        self.reports.write(self.reports.report(self.rank), found)

    def mark_finished(self) -> None:
        if self._entry.may_lose:  # the only run of this process
            super().mark_finished()

    def fail(self, error: Exception) -> None:
        if self._entry.is_first or not isinstance(error, BadInput):
            super().fail(error)

    def _note(self, step: Step, loss: Tensor) -> None:
        self._done += 1
        self._sent = self._tracer.sent.total
        if self._link_s_per_byte:  # a paced sender: the next step begins when these bytes are out
            before = self._paced
            self._paced = sent_bytes(self._entry, [step.sync.report()], self._sent) or 0.0
            with self._tracer.span(INJECTED, "--slow-link"):
                time.sleep((self._paced - before) * self._link_s_per_byte)

    def _stop(self) -> None:
        self.fail(
            ShoalError(
                f"stopped after {counted(self._done, 'step')}: more than {self._most_s:.0f} s, and "
                "ten times as long as all of single"
            )
        )

    def _check_model(self, step: Step) -> None:
        """Refuse a model that was trained in an earlier run: this one would look better."""
        if step.model in self._models:
            raise BadInput(
                "the script makes its model outside of the training function, so that it is "
                "trained already when the next strategy begins: make it inside, or add --apart"
            )
        self._models.add(step.model)


def compare(train: Train, plan: dict[str, Any]) -> None:
    """`plan` is what `shoal compare` has written for its workers."""
    config = RunConfig.from_environment()
    placement = detect(config)
    assert placement is not None
    send = open_progress(config.progress_fd)
    models: set[nn.Module] = set()
    num_threads = torch.get_num_threads()
    for number, entry in enumerate(ComparedRun(**fields) for fields in plan["entries"]):
        if placement.rank >= entry.workers:
            wait_for(RunDir(Path(entry.folder)).report(0))
            continue
        if placement.rank == 0:
            RunDir(Path(entry.folder)).begun.touch()
            if send is not None:
                send({"entry": entry.number})
        threads = num_threads if entry.workers > 1 else entry.threads or plan["cores"]
        torch.set_num_threads(threads)
        narrowed = replace(placement, size=entry.workers, local_size=entry.workers)
        if entry.workers < placement.size:  # the other workers do not join this run
            narrowed = replace(narrowed, rendezvous=f"{placement.rendezvous}-{number}")
        try:
            most_s = patience_s(ComparedRun(**plan["base"]))
            links = plan.get("slow_links", {})
            ComparisonWorker(entry, narrowed, plan["steps"], models, most_s, links).run(train)
        except BadInput as error:
            if entry.is_first:
                raise
            run_dir = RunDir(Path(entry.folder))
            run_dir.write(run_dir.report(placement.rank), {"refused": str(error)})


def wait_for(file: Path) -> None:
    """Until a run without this worker has ended, without taking its cores."""
    look = Backoff(0.001, 0.05)
    while not file.exists():
        look()


NAMES = ("evaluate", "test")  # of a function of (job, checkpoint), or of (job, checkpoint, about)


def evaluate(train: Train, checkpoint: str, result: str, script: str) -> None:
    """Call the script's test function, and write the metrics that it returns to `result`."""

    def test(job: Job) -> None:
        function = _test_function(train, script)
        given: list[Any] = [checkpoint]
        if len(inspect.signature(function).parameters) > 2:
            given.append(read_manifest(Path(checkpoint)).get("about") or {})
        try:
            found = function(job, *given)
        except (KeyError, TypeError, ValueError) as error:
            if len(given) < 2:
                raise
            raise CheckpointError(
                f"the checkpoint at {checkpoint} is damaged: what it says of {script} does not fit "
                f"({error})"
            ) from error
        if job.rank == 0 and found is not None:
            metrics = found if isinstance(found, dict) else {"metric": found}
            numbers = {str(name): float(value) for name, value in metrics.items()}
            Path(result).write_text(json.dumps(numbers), encoding="utf-8")

    with replaced_run(None):
        run(test)


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


def run_script(words: list[str], instead: Callable[[Train], None]) -> None:
    """Run a script, or the module of an example, with `instead` where it calls `shoal.run`."""

    def act(train: Train) -> None:
        instead(train)
        sys.exit(0)  # the rest of the script follows training

    script = words[0]
    sys.argv = words
    shoal.__dict__["run"] = run  # the import above has put the module under the name
    with replaced_run(act):
        if script.startswith("shoal.commands.examples."):
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    raise BadInput("the script has ended without a call of shoal.run(train)")


def main(argv: list[str]) -> None:
    if argv[0] == "compare":
        plan = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
        run_script(argv[2:], lambda train: compare(train, plan))
    else:
        run_script(argv[3:], lambda train: evaluate(train, *argv[1:4]))


if __name__ == "__main__":
    main(sys.argv[1:])
