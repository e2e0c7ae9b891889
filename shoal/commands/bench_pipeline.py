"""How `shoal bench pipeline` starts its workers and prints the results."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shoal.commands.bench_harness import measure_in_workers, say, spread
from shoal.commands.launching import config_for
from shoal.commands.output import plain_table, wide_console
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
    console = wide_console()
    for table in tables(steps, idle):
        console.print(table)


def tables(steps: list[Any], idle: list[Any]) -> list[Table]:
    heads = ["schedule", "shoal", "torch.distributed.\npipelining", "theirs /\nshoal"]
    times = plain_table("ms a step on 2 workers: median (quartiles)", heads, left=1)
    for r in steps:
        times.add_row(
            r["schedule"],
            spread(r["shoal"], "_ms"),
            spread(r["theirs"], "_ms"),
            spread(r["ratio"], ""),
        )
    title = "idle share of 4 stages, 8 micro-batches, layers that sleep"
    shares = plain_table(title, ["schedule", "simulated", "traced"], left=1)
    for r in idle:
        shares.add_row(r["schedule"], f"{r['simulated_idle']:.1%}", f"{r['traced_idle']:.1%}")
    return [times, shares]


def _measure(schedule: str, batch_size: int, microbatches: int, rounds: int, steps: int) -> Any:
    say(f"measuring {schedule} on 2")
    strategy = as_strategy(f'pp(2, schedule="{schedule}", microbatches={microbatches})')
    options = {"batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy, device="cpu")
    return measure_in_workers("shoal.bench.pipeline", options, 2, config)
