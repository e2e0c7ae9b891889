"""The runs of `shoal verify`: a script again and again, in forks of one process.

A new process would spend seconds on imports for a second of training. So this process loads torch,
and after the first run also what the script imports, and each worker of each run is a fork of it,
in which the script runs from its start. Where that cannot be, workers are new processes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.launching import check_trained, run_quietly
from shoal.errors import BadInput, ShoalError
from shoal.launch.processes import Forks
from shoal.launch.python_fork import can_fork, load, modules_to_load
from shoal.runtime.config import CaptureConfig, RunConfig
from shoal.runtime.wording import counted

if TYPE_CHECKING:
    from shoal.observe.captured_run import CapturedRun
    from shoal.observe.double_check import DoubleCheck
    from shoal.observe.own_precision import OwnCheck
    from shoal.observe.verify import Verification

DOUBLE_STEPS = 3  # in double precision, which takes longer
NOT_FINITE = (
    "there is nothing to compare: on one worker {}; take fewer --steps, or a smaller learning rate"
)
CHANCE = (
    "two runs of the script on one worker differ, so there is nothing to compare: {}; what it "
    "draws has to follow from the seed, not from the time or before `import shoal`"
)
GOES_ON = (
    "the script catches the exception that ends it after {}, as a bare `except:` does: "
    "catch Exception instead"
)
SEVERAL_CALLS = "the script calls shoal.run {} times: the first call is compared"


class ScriptRuns:
    """Runs the script for a capture, and prints that it does, since each run takes a while."""

    def __init__(
        self,
        command: Sequence[str],
        steps: int,
        folder: Path,
        quiet: bool,
        on: str | None = None,
    ):
        """`on`: the engine on whose hosts several workers run; one worker runs here."""
        self.command = command
        self.steps = steps
        self.folder = folder
        self.quiet = quiet
        self.count = 0
        self._on = on
        self._forks: Forks | None = None
        if on is None:  # all runs in forks or none: see `first`
            load()
            self._forks = Forks(folder / "modules.json") if can_fork(command) else None

    def first(self, name: str, config: RunConfig, **options: Any) -> CapturedRun:
        """On one worker. What it has imported need not be imported by the others."""
        run = self.capture(name, config, 1, **options)
        if self._forks is None or self._forks.modules_file is None:
            return run
        load(modules_to_load(self._forks.modules_file))
        if can_fork(self.command):
            self._forks = Forks()
            return run
        self._forks = None  # all runs in forks or none: Python orders sets by a seed of the process
        return self.capture(name, config, 1, **options)

    def capture(
        self, name: str, config: RunConfig, workers: int, steps: int | None = None, **options: Any
    ) -> CapturedRun:
        """`options` are those of CaptureConfig."""
        from shoal.observe.captured_run import CapturedRun

        steps = self.steps if steps is None else min(self.steps, steps)
        self.say(f"running {name}: up to {steps} steps")
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        capture = CaptureConfig(folder, steps, **options)
        on = self._on if workers > 1 else None
        run_quietly(self.command, workers, replace(config, capture=capture), self._forks, on)
        check_trained(folder / "capture.json")
        run = CapturedRun.read(folder)
        if not run.losses:
            check_trained(folder / "loss")
        if run.goes_on:
            raise BadInput(GOES_ON.format(counted(steps, "step")))
        return run

    @property
    def where(self) -> str:
        """ " of lab", where several workers run on hosts of an engine."""
        return "" if self._on is None else f" of {self._on}"

    def say(self, sentence: str) -> None:
        if not self.quiet:
            print(sentence, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunPair:
    """The two sides of a comparison: one worker, and several under a strategy."""

    runs: ScriptRuns
    single: RunConfig
    several: RunConfig
    strategy: str
    workers: int

    def alone(self) -> CapturedRun:
        """BadInput where it gives nothing that several workers could be compared with."""
        run = self.runs.first("alone", self.single, early=DOUBLE_STEPS)
        if run.not_finite is not None:
            raise BadInput(NOT_FINITE.format(run.not_finite))
        if run.calls > 1:
            self.runs.say(SEVERAL_CALLS.format(run.calls))
        return run

    def check_repeats(self, alone: CapturedRun) -> None:
        """BadInput where the script on one worker does not do the same again."""
        again = self.runs.capture("alone once more", self.single, 1)
        chance = alone.changes_by_chance(again)
        if chance is not None:
            raise BadInput(CHANCE.format(chance))

    def together(self, **options: Any) -> CapturedRun:
        where = " in double precision" if options.get("double") else ""
        name = f"{self.strategy} on {self.workers}{self.runs.where}{where}"
        return self.runs.capture(name, self.several, self.workers, **options)

    def again(self, **options: Any) -> CapturedRun:
        name = "alone, added up in another order"
        return self.runs.capture(name, self.single, 1, pieces=max(2, self.workers), **options)

    def in_double(self, narrow: CapturedRun, steps: int = DOUBLE_STEPS) -> DoubleCheck | None:
        """None if the script does not run in double precision."""
        from shoal.observe.double_check import check

        options = {"double": True, "steps": steps}
        try:
            alone = self.runs.capture("alone in double precision", self.single, 1, **options)
            return check(narrow, alone, self.together(**options), lambda: self.again(**options))
        except ShoalError as error:
            self.runs.say(f"the script does not run in double precision: {_last_line(error)}")
            return None

    def confirm(self, verdict: Verification, narrow: CapturedRun) -> DoubleCheck | None:
        """All steps in double precision, where the verdict rests on amplified rounding; else None.

        The first steps are equal there. A later one may have got other samples.
        """
        first, steps = verdict.double, verdict.steps
        if first is None or first.was_reordered or not verdict.ok or not verdict.amplified:
            return None
        if steps <= first.steps:
            return None
        return self.in_double(replace(narrow, early={}), steps)

    def in_own_precision(self) -> OwnCheck:
        """Of the first steps, where the script does not run in double precision."""
        from shoal.observe.own_precision import check_own

        options = {"optimizer": True, "steps": DOUBLE_STEPS}
        alone = self.runs.capture("alone, with the optimizer", self.single, 1, **options)
        return check_own(alone, self.together(**options), self.again(**options))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
