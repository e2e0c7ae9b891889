"""`shoal verify`: a script on one worker and under a strategy, compared tensor by tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.commands import options
from shoal.commands.launching import (
    check_engine,
    check_trained,
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.commands.output import show
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.python_fork import can_fork, load
from shoal.runtime.config import CaptureConfig, RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.strategy.base import Batches

if TYPE_CHECKING:
    from shoal.observe.captured_run import CapturedRun
    from shoal.observe.double_check import DoubleCheck, OwnCheck
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
        self._forks = False
        if on is None:  # all runs in forks or none: Python orders sets by a seed of the process
            load(command)
            self._forks = can_fork(command)

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
        run = self.runs.capture("alone", self.single, 1, early=DOUBLE_STEPS)
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
        from shoal.observe.double_check import check_own

        options = {"optimizer": True, "steps": DOUBLE_STEPS}
        alone = self.runs.capture("alone, with the optimizer", self.single, 1, **options)
        return check_own(alone, self.together(**options), self.again(**options))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


DRAWS = (
    "{} draws random numbers in its forward, which depend on the number of workers, as dropout "
    "masks do: the difference may come from that alone"
)
ORDER = (
    "the script's result depends on how its batches are cut: on one worker, {0.what} changes by "
    "{0.difference:.3g} when their samples are added up in another order, which is not rounding"
)
SUM = (
    "the first loss is 1/{} of that of one worker, so it is probably a sum over samples: it has to "
    "be a mean over the rows that it gets"
)
UNCOUNTED = (
    "some targets are -100, which losses ignore: a mean over tokens needs `count`, such as "
    "job.step(..., count=lambda batch: ({} != -100).sum()) or job.backward(loss, count=n)"
)
RAGGED = (
    "targets are lists, such as boxes: a loss that is divided by their number in the batch is no "
    "mean over samples, and needs that number as `count`: job.step(..., count=lambda batch: …) or "
    "job.backward(loss, count=n)"
)
SAME_RATIO = 0.02  # parts of a batch may differ by a row


def verify(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.Workers = 2,
    on: options.On = None,
    strategy: options.Strategy = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare, at most.")] = 20,
    seed: options.Seed = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Check that a strategy gives the result of one worker.

    The script runs four times: alone and under the strategy, in its own precision, and for the
    first 3 steps in double precision, where rounding vanishes and an error does not.
    """
    if on is not None:
        check_engine(on)
    command = command_for(script, args)
    value = strategy_for(strategy, workers)
    if not value.is_synchronous:
        raise BadInput(
            f"{value} does not promise the single-device result, so there is nothing to verify"
        )
    single = config_for(value.reference, seed, device)
    from shoal.observe.verify import judge  # torch: only after the options were checked

    with scratch_folder("verify") as folder:
        runs = ScriptRuns(command, steps, folder, quiet=as_json, on=on)
        pair = RunPair(runs, single, config_for(value, seed, device), str(value), workers)
        alone = pair.alone()
        together = pair.together()
        is_exact = alone.exact and together.exact
        double = None if is_exact else pair.in_double(alone)
        verdict = judge(alone, together, pair.again, double)
        confirmed = pair.confirm(verdict, alone)
        if confirmed is not None:
            verdict = judge(alone, together, pair.again, confirmed)
        if double is None and not is_exact:
            verdict = replace(verdict, own=pair.in_own_precision())
        if not verdict.ok:
            pair.check_repeats(alone)
    whole = value.sync_for(workers).batches is Batches.WHOLE_DATASET
    where = f"{counted(workers, 'worker')}{runs.where}"
    title = f"{script} under {value} on {where}, {steps_taken(verdict.steps, steps, whole)}"
    document = {"script": script, "strategy": str(value), "workers": workers}
    show({**document, **verdict.to_json()}, _lines(verdict, title), as_json)
    if not verdict.ok:
        for reason in _reasons(alone, together, workers):
            print(reason, file=sys.stderr if as_json else sys.stdout)
        raise typer.Exit(1)


def _reasons(alone: CapturedRun, together: CapturedRun, workers: int) -> Iterator[str]:
    """What is known to make a script depend on the number of workers."""
    if alone.ignored_targets is not None:
        yield UNCOUNTED.format(alone.ignored_targets)
    if alone.has_ragged_targets:
        yield RAGGED
    if alone.draws is not None:
        yield DRAWS.format(alone.draws)
    parts = _parts_of_sum(alone, together)
    if parts is not None and parts <= workers:
        yield SUM.format(parts)


def _parts_of_sum(alone: CapturedRun, together: CapturedRun) -> int | None:
    """How many times smaller the first loss is, if that is a whole number above 1."""
    if not alone.losses or not together.losses or not together.losses[0]:
        return None
    ratio = alone.losses[0] / together.losses[0]
    if not math.isfinite(ratio) or ratio < 1.5:
        return None
    return round(ratio) if abs(ratio / round(ratio) - 1) < SAME_RATIO else None


def steps_taken(taken: int, asked: int, of_everything: bool) -> str:
    """The number of steps, and why it is not the one that was asked for."""
    text = counted(taken, "step")
    text += " over the whole dataset each" if of_everything else ""
    return text if taken == asked else f"{text} (the script takes no more)"


def _lines(verdict: Verification, what: str) -> Iterator[str]:
    if verdict.switched_off:
        more = len(verdict.switched_off) - 1
        names = verdict.switched_off[0] + (f" and {more} more" if more else "")
        yield (
            f"dropout was switched off ({names}): its masks depend on the number of workers, "
            "unless exact=True"
        )
    for kind, preposition, found in (
        ("loss    ", "at", verdict.worst(verdict.losses)),
        ("tensor  ", "in", verdict.worst(verdict.tensors)),
    ):
        yield (
            f"largest difference of a {kind}{found.difference:.3g} {preposition} {found.what} "
            f"(tolerance {found.tolerance:.3g})"
        )
    yield from _about_rounding(verdict)
    if verdict.replicas_apart:
        yield f"replicas hold different parameters: up to {verdict.replicas_apart:.3g} apart"
    if verdict.first_loss:
        yield f"first loss that differs: {verdict.first_loss.what}"
    if verdict.first_tensor:
        yield f"first tensor that differs: {verdict.first_tensor.what}"
    yield f"{'equal' if verdict.ok else 'NOT EQUAL'}: {what}"


def _about_rounding(verdict: Verification) -> Iterator[str]:
    """Where the tolerances come from."""
    double = verdict.double
    if double is None:
        yield "tolerances: rounding, " + (
            "measured by adding up in another order"
            if verdict.measured_rounding
            else f"from {verdict.additions:,} additions per gradient element and "
            f"{counted(verdict.steps, 'step')}"
        )
        yield from _about_own_precision(verdict)
        return
    what, rounding = double.largest_rounding
    yield (
        f"rounding, measured on one worker {rounding:.3g} in {what} "
        f"({counted(double.steps, 'step')} beside double precision)"
    )
    worst = double.worst
    yield (
        f"in double precision, relative   {worst.difference:.3g} in {worst.what} "
        f"(tolerance {worst.tolerance:.3g})"
    )
    if verdict.amplified:
        yield (
            f"training amplifies rounding in {len(verdict.amplified)} tensors, such as "
            f"{verdict.amplified[0]}: equal in double precision"
        )
    if double.order is not None:
        yield ORDER.format(double.order)
    elif not double.ok:
        first = next(d.what for d in double.tensors if not d.is_equal)
        yield f"first difference in double precision, which is an error: {first}"


def _about_own_precision(verdict: Verification) -> Iterator[str]:
    """How small an error was looked for, where there is no double precision."""
    if verdict.own is None or verdict.own.worst is None:
        return
    worst = verdict.own.worst
    yield (
        f"in its own precision, relative  {worst.difference:.3g} in {worst.what} "
        f"(tolerance {worst.tolerance:.3g}, measured by adding up in another order)"
    )
    least = verdict.own.least
    if least is not None and math.isfinite(least.tolerance):
        yield (
            f"an error of a gradient above {least.tolerance:.1g} of it would have been found "
            f"(the least in {least.what})"
        )
    elif least is not None:
        yield f"{least.what} is all rounding: an error of its gradient would not have been found"
