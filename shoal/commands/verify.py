"""`shoal verify`: a script on one worker and under a strategy, compared tensor by tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.commands import launching, options
from shoal.commands.options import option
from shoal.commands.output import show
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.local import template_of
from shoal.launch.here.template import Template
from shoal.runtime.config import CaptureConfig, RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.strategy.base import Batches

if TYPE_CHECKING:
    from shoal.observe.double_check import CapturedRun, Difference, DoubleCheck, OwnCheck
    from shoal.observe.verify import Verification


DOUBLE_STEPS = 3  # in double precision, which takes longer
SAME_RATIO = 0.02  # parts of a batch may differ by a row


@dataclass
class ScriptRuns:
    """Runs a script on one worker, here, and on several, on hosts of the engine `on` if given."""

    command: Sequence[str]
    configs: Sequence[RunConfig]  # of one worker, and of several
    workers: int
    steps: int
    folder: Path
    quiet: bool
    on: str | None = None
    count: int = 0
    template: Template | None = None

    def alone(self) -> CapturedRun:
        """BadInput where it gives nothing that several workers could be compared with."""
        run = self.capture("alone", 1, early=DOUBLE_STEPS)
        if run.not_finite is not None:
            raise BadInput(
                f"there is nothing to compare: on one worker {run.not_finite}; take fewer --steps, "
                "or a smaller learning rate"
            )
        if run.calls > 1:
            self.say(f"the script calls shoal.run {run.calls} times: the first call is compared")
        return run

    def capture(
        self, name: str, workers: int, steps: int | None = None, **options: Any
    ) -> CapturedRun:
        """`options` are those of CaptureConfig."""
        from shoal.observe.double_check import CapturedRun

        steps = self.steps if steps is None else min(self.steps, steps)
        self.say(f"running {name}: up to {steps} steps")
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        config = replace(self.configs[workers > 1], capture=CaptureConfig(folder, steps, **options))
        on = self.on if workers > 1 else None
        launching.run_quietly(self.command, workers, config, self.template, on)
        launching.check_trained(folder / "capture.json")
        run = CapturedRun.read(folder)
        if not run.losses:
            launching.check_trained(folder / "loss")
        if run.goes_on:
            raise BadInput(
                f"the script catches the exception that ends it after {counted(steps, 'step')}, as "
                "a bare `except:` does: catch Exception instead"
            )
        return run

    def together(self, **options: Any) -> CapturedRun:
        where = "" if self.on is None else f" of {self.on}"
        where += " in double precision" if options.get("double") else ""
        name = f"{self.configs[1].strategy} on {self.workers}{where}"
        return self.capture(name, self.workers, **options)

    def again(self, **options: Any) -> CapturedRun:
        pieces = max(2, self.workers)
        return self.capture("alone, added up in another order", 1, pieces=pieces, **options)

    def in_double(self, narrow: CapturedRun, steps: int = DOUBLE_STEPS) -> DoubleCheck | None:
        """None if the script does not run in double precision."""
        from shoal.observe.double_check import check

        options: dict[str, Any] = {"double": True, "steps": steps}
        try:
            alone = self.capture("alone in double precision", 1, **options)
            return check(narrow, alone, self.together(**options), lambda: self.again(**options))
        except ShoalError as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
            self.say(f"the script does not run in double precision: {why}")
            return None

    def confirm(self, verdict: Verification, narrow: CapturedRun) -> DoubleCheck | None:
        """All steps in double precision, if the verdict rests on amplified rounding; else None."""
        first = verdict.double
        steps = verdict.steps
        if first is None or first.was_reordered or not verdict.ok or not verdict.amplified:
            return None
        return self.in_double(replace(narrow, early={}), steps) if steps > first.steps else None

    def in_own_precision(self) -> OwnCheck:
        """Of the first steps, where the script does not run in double precision."""
        from shoal.observe.double_check import check_own

        options: dict[str, Any] = {"optimizer": True, "steps": DOUBLE_STEPS}
        alone = self.capture("alone, with the optimizer", 1, **options)
        return check_own(alone, self.together(**options), self.again(**options))

    def say(self, sentence: str) -> None:
        if not self.quiet:
            print(sentence, file=sys.stderr, flush=True)


def verify(
    script: options.Script,
    args: list[str] | None = options.SCRIPT_ARGS,
    workers: options.Workers = 2,
    on: str | None = options.ON,
    strategy: options.Strategy = None,
    steps: int = option("Training steps to compare, at most.", 20, min=1),
    seed: int | None = options.SEED,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Check that a strategy gives the result of one worker.

    The script runs four times: alone and under the strategy, in its own precision, and for the
    first 3 steps in double precision, where rounding vanishes and an error does not.
    """
    if on is not None:
        launching.check_engine(on)
    command = launching.command_for(script, args)
    value = launching.strategy_for(strategy, workers)
    if not value.is_synchronous:
        raise BadInput(
            f"{value} does not promise the single-device result, so there is nothing to verify"
        )
    configs = [launching.config_for(one, seed, device) for one in (value.reference, value)]
    with scratch_folder("verify") as folder, template_of(command, configs[1], True) as template:
        runs = ScriptRuns(command, configs, workers, steps, folder, as_json, on, template=template)
        alone = runs.alone()
        together = runs.together()
        verdict = _judged(runs, alone, together)
    where = counted(workers, "worker") + ("" if on is None else f" of {on}")
    taken = counted(verdict.steps, "step")
    if value.sync_for(workers).batches is Batches.WHOLE_DATASET:
        taken += " over the whole dataset each"
    if verdict.steps == steps:
        runs.say(
            f"the script was ended after {counted(steps, 'step')}: what it does later, such as an "
            "evaluation, was not reached; --steps takes more"
        )
    else:
        taken += " (all that the script takes)"
    lines = [*_lines(verdict), f"{'equal' if verdict.ok else 'NOT EQUAL'}: {script} under {value} "]
    lines[-1] += f"on {where}, {taken}"
    document = {"script": script, "strategy": str(value), "workers": workers}
    show({**document, **verdict.to_json()}, lines, as_json)
    if not verdict.ok:
        for reason in _reasons(alone, together, workers):
            print(reason, file=sys.stderr if as_json else sys.stdout)
        raise typer.Exit(1)


def _judged(runs: ScriptRuns, alone: CapturedRun, together: CapturedRun) -> Verification:
    from shoal.observe.verify import judge  # torch: only after the options were checked

    is_exact = alone.exact and together.exact
    double = None if is_exact else runs.in_double(alone)
    verdict = judge(alone, together, runs.again, double)
    confirmed = runs.confirm(verdict, alone)
    if confirmed is not None:
        verdict = judge(alone, together, runs.again, confirmed)
    if double is None and not is_exact:
        verdict = replace(verdict, own=runs.in_own_precision())
    if not verdict.ok:
        chance = alone.changes_by_chance(runs.capture("alone once more", 1))
        if chance is not None:
            raise BadInput(
                "two runs of the script on one worker differ, so there is nothing to compare: "
                f"{chance}; what it draws has to follow from the seed, not from the time or "
                "before `import shoal`"
            )
    return verdict


def _reasons(alone: CapturedRun, together: CapturedRun, workers: int) -> Iterator[str]:
    """What is known to make a script depend on the number of workers."""
    if alone.ignored_targets is not None:
        yield (
            "some targets are -100, which losses ignore: a mean over tokens needs `count`, such as "
            f"job.step(..., count=lambda batch: ({alone.ignored_targets} != -100).sum()) or "
            "job.backward(loss, count=n)"
        )
    if alone.has_ragged_targets:
        yield (
            "targets are lists, such as boxes: a loss that is divided by their number in the batch "
            "is no mean over samples, and needs that number as `count`: job.step(..., "
            "count=lambda batch: …) or job.backward(loss, count=n)"
        )
    if alone.draws is not None:
        yield (
            f"{alone.draws} draws random numbers in its forward, which depend on the number of "
            "workers, as dropout masks do: the difference may come from that alone"
        )
    mine, theirs = (next(iter(run.losses), 0.0) for run in (alone, together))
    ratio = mine / theirs if theirs else 0.0
    is_whole = math.isfinite(ratio) and ratio >= 1.5
    if is_whole and round(ratio) <= workers and abs(ratio / round(ratio) - 1) < SAME_RATIO:
        yield (
            f"the first loss is 1/{round(ratio)} of that of one worker, so it is probably a sum "
            "over samples: it has to be a mean over the rows that it gets"
        )


def _lines(verdict: Verification) -> Iterator[str]:
    from shoal.observe.double_check import worst

    if verdict.switched_off:
        more = len(verdict.switched_off) - 1
        names = verdict.switched_off[0] + (f" and {more} more" if more else "")
        yield (
            f"dropout was switched off ({names}): its masks depend on the number of workers, "
            "unless exact=True"
        )
    yield f"largest difference of a loss    {_far(worst(verdict.losses), 'at')}"
    yield f"largest difference of a tensor  {_far(worst(verdict.tensors))}"
    yield from _about_rounding(verdict)
    if verdict.replicas_apart:
        yield f"replicas hold different parameters: up to {verdict.replicas_apart:.3g} apart"
    for kind, first in (("loss", verdict.first_loss), ("tensor", verdict.first_tensor)):
        if first:
            yield f"first {kind} that differs: {first.what}"


def _far(found: Difference, preposition: str = "in", more: str = "") -> str:
    where = f"{found.difference:.3g} {preposition} {found.what}"
    return f"{where} (tolerance {found.tolerance:.3g}{more})"


def _about_rounding(verdict: Verification) -> Iterator[str]:
    """Where the tolerances come from."""
    double = verdict.double
    if double is None:
        how = f"from {verdict.additions:,} additions per gradient element and "
        how += counted(verdict.steps, "step")
        how = "measured by adding up in another order" if verdict.measured_rounding else how
        yield f"tolerances: rounding, {how}"
        yield from _about_own_precision(verdict.own)
        return
    what, rounding = double.largest_rounding
    yield (
        f"rounding, measured on one worker {rounding:.3g} in {what} "
        f"({counted(double.steps, 'step')} beside double precision)"
    )
    yield f"in double precision, relative   {_far(double.worst)}"
    if verdict.amplified:
        yield (
            f"training amplifies rounding in {len(verdict.amplified)} tensors, such as "
            f"{verdict.amplified[0]}: equal in double precision"
        )
    if double.order is not None:
        yield (
            "the script's result depends on how its batches are cut: on one worker, "
            f"{double.order.what} changes by {double.order.difference:.3g} when their samples are "
            "added up in another order, which is not rounding"
        )
    elif not double.ok:
        first = next(d.what for d in double.tensors if not d.is_equal)
        yield f"first difference in double precision, which is an error: {first}"


def _about_own_precision(own: OwnCheck | None) -> Iterator[str]:
    """How small an error was looked for, where there is no double precision."""
    if own is None or not own.tensors:
        return
    least = own.least
    measured = ", measured by adding up in another order"
    yield f"in its own precision, relative  {_far(own.worst, more=measured)}"
    if least is not None and math.isfinite(least.tolerance):
        yield (
            f"an error of a gradient above {least.tolerance:.1g} of it would have been found "
            f"(the least in {least.what})"
        )
    elif least is not None:
        yield f"{least.what} is all rounding: an error of its gradient would not have been found"
