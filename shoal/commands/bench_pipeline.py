"""How `shoal bench pipeline` starts its workers and prints the results."""

from __future__ import annotations

from typing import Any

from shoal.commands.bench_harness import measure_in_workers, say, spread
from shoal.commands.launching import config_for
from shoal.strategy.strategy import as_strategy

PEERS = ("gpipe", "1f1b")
IDLE = ("inter-op", "gpipe", "1f1b", "interleaved", "zb-h1")


def measure_steps(batch_size: int, microbatches: int, rounds: int, steps: int) -> list[Any]:
    return [_measure(name, batch_size, microbatches, rounds, steps) for name in PEERS]


def measure_idle() -> list[Any]:
    from shoal.bench.pipeline_idle import compare

    results = []
    for name in IDLE:
        say(f"tracing {name}")
        results.append(compare(name))
    return results


def print_tables(steps: list[Any], idle: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ms a step on 2 workers: median (quartiles)")
    for column in ("schedule", "shoal", "torch.distributed.pipelining", "theirs / shoal"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for r in steps:
        table.add_row(
            r["schedule"],
            spread(r["shoal"], "_ms"),
            spread(r["theirs"], "_ms"),
            spread(r["ratio"], ""),
        )
    Console().print(table)
    table = Table(title="idle share of 4 stages, 8 micro-batches, layers that sleep")
    for column in ("schedule", "simulated", "traced"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for r in idle:
        table.add_row(r["schedule"], f"{r['simulated_idle']:.1%}", f"{r['traced_idle']:.1%}")
    Console().print(table)


def _measure(schedule: str, batch_size: int, microbatches: int, rounds: int, steps: int) -> Any:
    say(f"measuring {schedule} on 2")
    strategy = as_strategy(f'pp(2, schedule="{schedule}", microbatches={microbatches})')
    options = {"batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy, device="cpu")
    return measure_in_workers("shoal.bench.pipeline", options, 2, config)
