"""`shoal verify`: a script on one worker and under a strategy, compared tensor by tensor."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.commands import options
from shoal.commands.engines import check_engine
from shoal.commands.launching import command_for, config_for, strategy_for
from shoal.commands.verify_runs import RunPair, ScriptRuns
from shoal.errors import BadInput
from shoal.runtime.files import scratch_folder
from shoal.runtime.wording import counted
from shoal.strategy.base import Batches

if TYPE_CHECKING:
    from shoal.observe.captured_run import CapturedRun
    from shoal.observe.verify import Verification

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
    if as_json:
        document = {"script": script, "strategy": str(value), "workers": workers}
        print(json.dumps({**document, **verdict.to_json()}))
    else:
        taken = steps_taken(
            verdict.steps, steps, value.sync_for(workers).batches is Batches.WHOLE_DATASET
        )
        where = f"{counted(workers, 'worker')}{runs.where}"
        _print(verdict, f"{script} under {value} on {where}, {taken}")
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


def _print(verdict: Verification, what: str) -> None:
    for name in verdict.switched_off[:1]:
        print(
            f"dropout was switched off ({name}"
            + (
                f" and {len(verdict.switched_off) - 1} more"
                if len(verdict.switched_off) > 1
                else ""
            )
            + "): its masks depend on the number of workers, unless exact=True"
        )
    loss = verdict.worst(verdict.losses)
    tensor = verdict.worst(verdict.tensors)
    print(
        f"largest difference of a loss    {loss.difference:.3g} at {loss.what} "
        f"(tolerance {loss.tolerance:.3g})"
    )
    print(
        f"largest difference of a tensor  {tensor.difference:.3g} in {tensor.what} "
        f"(tolerance {tensor.tolerance:.3g})"
    )
    for sentence in _about_rounding(verdict):
        print(sentence)
    if verdict.replicas_apart:
        print(f"replicas hold different parameters: up to {verdict.replicas_apart:.3g} apart")
    if verdict.first_loss:
        print(f"first loss that differs: {verdict.first_loss.what}")
    if verdict.first_tensor:
        print(f"first tensor that differs: {verdict.first_tensor.what}")
    print(f"{'equal' if verdict.ok else 'NOT EQUAL'}: {what}")


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
