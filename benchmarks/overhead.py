"""What `job.step` costs beside the computing: the plain loop and `single`, in turns.

Models from a few hundred parameters, where a step is nothing but Python, to GPT-2. `synchronized`:
the device is waited for after each step, as a script does that prints every loss; else after a
round of steps, so that the host is the bound where its work takes longer than the device's.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

import shoal
from benchmarks.harness import (
    alternate,
    beside_peer,
    measure_in_workers,
    options_of_worker,
    peer_cells,
    say,
    write_result,
)
from benchmarks.step import Workload, digits, gpt, mlp
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table


class Case(NamedTuple):
    """A model and its batch; how many steps a round has."""

    workload: Callable[[], Workload]
    steps: int
    precision: str = "fp32"
    compiled: bool = False


_GPT2 = partial(gpt, "large")
CASES = {
    "mlp-16": Case(partial(mlp, 16, 8), 200),
    "mlp-64": Case(partial(mlp, 64, 32), 100),
    "digits": Case(partial(digits, 64), 50),
    "mlp-256": Case(partial(mlp, 256, 64), 50),
    "gpt": Case(partial(gpt, "small", 16), 10),
}
ON_CUDA = {
    "gpt2-8": Case(partial(_GPT2, 8), 10, "bf16"),
    "gpt2-32": Case(partial(_GPT2, 32), 5, "bf16"),
    "gpt2-8-compiled": Case(partial(_GPT2, 8), 10, "bf16", compiled=True),
    "gpt2-32-compiled": Case(partial(_GPT2, 32), 5, "bf16", compiled=True),
}


def cases(device: str | None) -> list[str]:
    """All that suit a device; by default the GPU, where there is one."""
    is_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    return [*CASES, *(ON_CUDA if is_cuda else ())]


def _optimizer(device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=1e-4, fused=device.type == "cuda" or None)


def _plain_step(model: nn.Module, case: Case, loss: Any, batch: Any) -> Callable[[], Any]:
    """The loop of every PyTorch tutorial."""
    device = batch[0].device
    optimizer = _optimizer(device)(model.parameters())
    autocast = nullcontext
    if case.precision == "bf16":
        autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16)  # type: ignore[assignment]

    def step() -> Any:
        optimizer.zero_grad()
        with autocast():
            value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        return value

    return step


def _ways(job: shoal.Job, case: Case) -> Iterator[tuple[str, Callable[[], Any]]]:
    model, loss, inputs, targets = case.workload()
    model = model.to(job.device)
    peer = copy.deepcopy(model)
    options = {"optimizer": _optimizer(job.device), "precision": case.precision}
    if case.compiled:
        model, peer = torch.compile(model), torch.compile(peer)  # type: ignore[assignment]
    ours = job.step(model, loss, **options)  # type: ignore[arg-type]
    on_device = (inputs.to(job.device), targets.to(job.device))
    batch = next(iter(job.batches([on_device])))
    yield "shoal", lambda: ours(batch)
    yield "peer", _plain_step(peer, case, loss, on_device)


def measure(job: shoal.Job, names: list[str], rounds: int) -> list[Any]:
    synchronize = torch.cuda.synchronize if job.device.type == "cuda" else None
    found = []
    for name in names:
        case = {**CASES, **ON_CUDA}[name]
        ways = dict(_ways(job, case))
        for is_synchronized in [False, True] if synchronize else [False]:
            timed = ways
            if is_synchronized:
                timed = {way: partial(_then, call, synchronize) for way, call in ways.items()}
            times = alternate(timed, rounds, case.steps, after_round=synchronize or _nothing)
            pairs = zip(times["shoal"], times["peer"], strict=True)
            more_us = statistics.quantiles([1e3 * (a - b) for a, b in pairs], n=4)
            found.append(
                {
                    "case": name,
                    "synchronized": is_synchronized,
                    "more_us": dict(zip(("low", "median", "high"), more_us, strict=True)),
                    **beside_peer(times),
                }
            )
    return found


def _nothing() -> None:
    """There is nothing to wait for on a CPU."""


def _then(call: Callable[[], Any], synchronize: Any) -> None:
    call()
    synchronize()


def run(names: list[str], rounds: int, device: str | None) -> Any:
    say(f"measuring {', '.join(names)}")
    asked = {"cases": json.dumps(names), "rounds": rounds}
    config = config_for(strategy_for("single", 1), device=device)
    return measure_in_workers("benchmarks.overhead", asked, 1, config)


def table_of(results: list[Any]) -> Table:
    heads = ["model", "wait", "shoal", "plain", "plain /\nshoal", "more,\nµs a step"]
    rows = []
    for r in results:
        more = r["more_us"]
        cell = f"{more['median']:.0f}\n({more['low']:.0f}–{more['high']:.0f})"
        wait = "step" if r["synchronized"] else "round"
        rows.append([r["case"], wait, *peer_cells(r), cell])
    return plain_table("ms a step: median (quartiles)", heads, rows, left=2)


if __name__ == "__main__":
    args = options_of_worker(cases=str, rounds=int)
    write_result(lambda job: measure(job, json.loads(args.cases), args.rounds), args.result)
