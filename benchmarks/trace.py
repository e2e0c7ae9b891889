"""What a trace costs a step: the same model with a recorder of spans and without, in turns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.table import Table

import shoal
from benchmarks.harness import alternate, beside_peer, measure_in_workers, peer_cells, say
from benchmarks.step import ROUNDS, SGD, WORKLOADS, main
from shoal.comm.group import Group
from shoal.comm.tracing import Traced
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.runtime.trace import OFF, Recorder
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices


def measure(job: shoal.Job, workload: str, batch_size: int, rounds: int, steps: int) -> Any:
    """Milliseconds a step without a trace ("shoal") and with one, and the ratio of the two."""
    model, loss, inputs, targets = WORKLOADS[workload](batch_size)
    recorder = Recorder(job.rank, 0)
    ways: dict[str, Callable[[], Any]] = {}
    for name, tracer in (("shoal", OFF), ("peer", recorder)):
        group = job.group.duplicate()
        group = Group(Traced(group.executor, tracer)) if tracer.enabled else group
        services = RunServices(tracer=tracer)
        each = Job(job.strategy, group, device=job.device, services=services)
        step = each.step(copy.deepcopy(model).to(job.device), loss, optimizer=SGD)
        batch = next(iter(each.batches([(inputs, targets)])))
        ways[name] = partial(step, batch)
    times = alternate(ways, rounds, steps, lambda: job.group.barrier().wait())
    steps_made = sum(span.kind == "step" for span in recorder.spans)
    spans = len(recorder.spans) / max(1, steps_made)
    return {"workload": workload, "workers": job.size, "spans": spans, **beside_peer(times)}


def run(name: str, workers: int, rounds: int, strategy: str | None) -> Any:
    say(f"measuring {name} on {workers}")
    batch_size, steps = ROUNDS[name]
    asked = {"workload": name, "batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy_for(strategy, workers), device="cpu")
    return measure_in_workers("benchmarks.trace", asked, workers, config)


def table_of(results: list[Any]) -> Table:
    heads = ["workload", "workers", "spans\na step", "without", "traced", "traced /\nwithout"]
    rows = [
        [r["workload"], str(r["workers"]), f"{r['spans']:.1f}", *peer_cells(r)] for r in results
    ]
    return plain_table("ms a step: median (quartiles)", heads, rows, left=1)


if __name__ == "__main__":
    main(measure)
