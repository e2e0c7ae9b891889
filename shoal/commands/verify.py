"""`shoal verify`: a script on one worker and under a strategy, compared tensor by tensor."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.commands import options
from shoal.commands.launching import (
    check_trained,
    command_for,
    config_for,
    run_quietly,
    strategy_for,
)
from shoal.errors import BadInput
from shoal.runtime.config import CaptureConfig, RunConfig
from shoal.strategy.base import Batches

if TYPE_CHECKING:
    from shoal.observe.verify import CapturedRun, Verification


def verify(
    script: options.Script,
    args: options.ScriptArgs = None,
    workers: options.Workers = 2,
    strategy: options.Strategy = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare, at most.")] = 20,
    seed: options.Seed = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Check that a strategy gives the result of one worker."""
    from shoal.observe.verify import judge

    command = command_for(script, args)
    value = strategy_for(strategy, workers)
    if not value.is_synchronous:
        raise BadInput(
            f"{value} does not promise the single-device result, so there is nothing to verify"
        )
    single = config_for(value.reference, seed, device)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        runs = _Runs(command, steps, Path(folder), quiet=as_json)
        alone = runs.capture("alone", single, 1)
        together = runs.capture(f"{value} on {workers}", config_for(value, seed, device), workers)
        verdict = judge(
            alone,
            together,
            lambda: runs.capture(
                "alone, added up in another order",
                single,
                1,
                pieces=max(2, workers),
            ),
        )
    if as_json:
        document = {"script": script, "strategy": str(value), "workers": workers}
        print(json.dumps({**document, **verdict.to_json()}))
    else:
        taken = steps_taken(
            verdict.steps, steps, value.sync_for(workers).batches is Batches.WHOLE_DATASET
        )
        _print(verdict, f"{script} under {value} on {workers} workers, {taken}")
    if not verdict.ok:
        raise typer.Exit(1)


class _Runs:
    """Runs the script for a capture, and prints that it does, since each run takes a while."""

    def __init__(self, command: Sequence[str], steps: int, folder: Path, quiet: bool):
        self.command = command
        self.steps = steps
        self.folder = folder
        self.quiet = quiet
        self.count = 0

    def capture(self, name: str, config: RunConfig, workers: int, pieces: int = 1) -> CapturedRun:
        from shoal.observe.verify import CapturedRun

        if not self.quiet:
            print(f"running {name}: up to {self.steps} steps", file=sys.stderr, flush=True)
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        capture = CaptureConfig(folder, self.steps, pieces)
        run_quietly(self.command, workers, replace(config, capture=capture))
        check_trained(folder / "capture.json")
        return CapturedRun.read(folder)


def steps_taken(taken: int, asked: int, of_everything: bool) -> str:
    """The number of steps, and why it is not the one that was asked for."""
    text = f"{taken} step{'s' if taken != 1 else ''}"
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
    source = (
        "measured by adding up in another order"
        if verdict.measured_rounding
        else (
            f"from {verdict.additions:,} additions per gradient element and {verdict.steps} steps"
        )
    )
    print(
        f"largest difference of a loss    {loss.difference:.3g} at {loss.what} "
        f"(tolerance {loss.tolerance:.3g})"
    )
    print(
        f"largest difference of a tensor  {tensor.difference:.3g} in {tensor.what} "
        f"(tolerance {tensor.tolerance:.3g})"
    )
    print(f"tolerances: rounding, {source}")
    if verdict.replicas_apart:
        print(f"replicas hold different parameters: up to {verdict.replicas_apart:.3g} apart")
    if verdict.first_loss:
        print(f"first loss that differs: {verdict.first_loss.what}")
    if verdict.first_tensor:
        print(f"first tensor that differs: {verdict.first_tensor.what}")
    print(f"{'equal' if verdict.ok else 'NOT EQUAL'}: {what}")
