"""`shoal bench`: measurements against a peer, in one run on this machine."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.commands.target import Device, Json, environment, run_quietly, strategy_for
from shoal.errors import BadInput

app = typer.Typer(help="Measure against a peer, alternately in one run.", no_args_is_help=True)

# name -> (batch size, steps a round): rounds of about a quarter of a second on one core
WORKLOADS = {"digits": (64, 60), "gpt": (16, 4), "mlp": (64, 4), "mlp-small": (64, 100)}


@app.callback()
def about() -> None:
    """Measure against a peer, alternately in one run."""


@app.command()
def step(
    workers: Annotated[
        list[int] | None, typer.Option("--workers", "-n", help="Number of workers; repeatable.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to take medians over.")] = 15,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """ms a step: Shoal against the plain loop (1 worker) or DistributedDataParallel."""
    results = []
    for count in workers or [1, 2]:
        for name in workload or ["digits", "gpt", "mlp"]:
            if name not in WORKLOADS:
                raise BadInput(f"there is no workload {name!r}: take {', '.join(WORKLOADS)}")
            if not as_json:
                print(f"measuring {name} on {count}", file=sys.stderr, flush=True)
            results.append(_measure(name, count, rounds, device))
    print(json.dumps({"results": results})) if as_json else _print(results)


@app.command()
def collectives(
    against: Annotated[str, typer.Option(help="gloo, mpi, or both with a comma.")] = "gloo,mpi",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 2,4.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(help="Bytes a rank gives, such as 4,1KB,1MB.")
    ] = "4,1KB,64KB,1MB,4MB,16MB,64MB,100MB",
    kinds: Annotated[str, typer.Option(help="Collectives, with commas.")] = "all_reduce",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to take medians over.")] = 15,
    as_json: Json = False,
) -> None:
    """µs a call: shared memory against Gloo, Open MPI and the speed of the memory."""
    from shoal.commands.bench_collectives import measure, print_table

    results = measure(against.split(","), ranks, sizes, kinds, rounds)
    print(json.dumps({"results": results})) if as_json else print_table(results)


@app.command()
def pipeline(
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 32,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches in a batch.")] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to take medians over.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps a round.")] = 2,
    idle: Annotated[bool, typer.Option(help="Also trace how long stages idle.")] = True,
    as_json: Json = False,
) -> None:
    """ms a step: pp(2) against torch.distributed.pipelining; the idle share, traced and simulated.

    Both ways run in the same two processes, in turn. Idling is traced on layers that sleep.
    """
    from shoal.commands.bench_pipeline import measure_idle, measure_steps, print_tables

    found = measure_steps(batch_size, microbatches, rounds, steps)
    shares = measure_idle() if idle else []
    print(json.dumps({"results": found, "idle": shares})) if as_json else print_tables(
        found, shares
    )


@app.command()
def ps(
    against: Annotated[str, typer.Option(help="ray, rpc, or both with a comma.")] = "ray,rpc",
    size: Annotated[str, typer.Option(help="Bytes of the weights, such as 100MB.")] = "100MB",
    rows: Annotated[int, typer.Option(min=1, help="Rows of 64 floats in a sparse pull.")] = 1000,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to take medians over.")] = 15,
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of workers.")] = 2,
    as_json: Json = False,
) -> None:
    """ms a round of the parameter server: against Ray's example and torch.distributed.rpc."""
    from shoal.commands.bench_ps import measure, print_table

    found = measure(against.split(","), size, rows, rounds, workers)
    print(json.dumps(found)) if as_json else print_table(found)


def _measure(name: str, workers: int, rounds: int, device: str | None) -> Any:
    batch_size, steps = WORKLOADS[name]
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        result = Path(folder) / "result.json"
        options = {"workload": name, "batch-size": batch_size, "rounds": rounds, "steps": steps}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "shoal.bench.step", *words, "--result", str(result)]
        run_quietly(command, workers, environment(strategy_for(None, workers), device=device))
        return json.loads(result.read_text())


def _print(results: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="ms a step: median (quartiles)")
    for column in ("workload", "workers", "parameters", "shoal", "peer", "", "peer / shoal"):
        table.add_column(column, justify="left" if column in ("workload", "") else "right")
    for r in results:
        table.add_row(
            r["workload"],
            str(r["workers"]),
            f"{r['parameters']:,}",
            _spread(r["shoal"], "_ms"),
            _spread(r["theirs"], "_ms"),
            r["peer"],
            _spread(r["ratio"], ""),
        )
    Console().print(table)
    print("peer / shoal above 1: Shoal is faster")


def _spread(found: dict[str, float], unit: str) -> str:
    median, low, high = (found[key + unit] for key in ("median", "low", "high"))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"
