"""`shoal bench`: Shoal measured against other libraries, alternately in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.commands import options
from shoal.commands.bench_harness import measure_in_workers, say, spread
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput

app = typer.Typer(help="Measure Shoal against other libraries.", no_args_is_help=True)

# name -> (batch size, steps a round): rounds of about a quarter of a second on one core
WORKLOADS = {"digits": (64, 60), "gpt": (16, 4), "mlp": (64, 4), "mlp-small": (64, 100)}


@app.callback()
def about() -> None:
    """Measure Shoal against other libraries.

    Both take turns in one run; ratios are medians over rounds.
    """


@app.command()
def step(
    workers: Annotated[
        list[int] | None,
        typer.Option(
            "--workers", "-n", min=1, help="Number of workers; repeatable.", show_default="1 and 2"
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(WORKLOADS)}; repeatable.", show_default="digits, gpt and mlp"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 15,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Milliseconds per training step.

    Against a plain PyTorch loop on one worker, and DistributedDataParallel on several.
    """
    for name in workload or ():
        if name not in WORKLOADS:
            raise BadInput(f"there is no workload {name!r}: take {', '.join(WORKLOADS)}")
    results = []
    for count in workers or [1, 2]:
        for name in workload or ["digits", "gpt", "mlp"]:
            say(f"measuring {name} on {count}")
            results.append(_measure(name, count, rounds, device))
    print(json.dumps({"results": results})) if as_json else _print(results)


@app.command()
def hosts(
    lab: Annotated[str | None, typer.Option(help="The lab (`shoal lab up`).")] = None,
    ranks: Annotated[
        str, typer.Option(help="Numbers of hosts, such as 2,3,4.", show_default="all hosts")
    ] = "",
    size: Annotated[str, typer.Option(help="Bytes that each rank gives.")] = "100MB",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Seconds of an all-reduce between the hosts of a lab.

    Ring, star, tree and, with racks, hierarchical and a badly ordered ring over TCP, against
    Gloo, against the rate of the links, and against what the lab's cluster file predicts.
    """
    from shoal.commands.bench_hosts import measure, print_table

    found = measure(lab, ranks, size, rounds)
    print(json.dumps(found)) if as_json else print_table(found)


@app.command()
def collectives(
    against: Annotated[str, typer.Option(help="gloo, mpi, or both with a comma.")] = "gloo,mpi",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 2,4.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(help="Bytes a rank gives, such as 4,1KB,1MB.")
    ] = "4,1KB,64KB,1MB,4MB,16MB,64MB,100MB",
    kinds: Annotated[str, typer.Option(help="Collectives, with commas.")] = "all_reduce",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 15,
    as_json: options.Json = False,
) -> None:
    """Microseconds per call of a collective.

    Through shared memory: against Gloo, Open MPI, and the speed of the memory.
    """
    from shoal.commands.bench_collectives import measure, print_table

    results = measure(against.split(","), ranks, sizes, kinds, rounds)
    print(json.dumps({"results": results})) if as_json else print_table(results)


@app.command()
def pipeline(
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 32,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches in a batch.")] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 2,
    idle: Annotated[bool, typer.Option(help="Also trace how long stages idle.")] = True,
    as_json: options.Json = False,
) -> None:
    """Milliseconds per step of pp(2), and how long stages idle.

    Against torch.distributed.pipelining, alternately in the same two processes. The idle share
    is traced on layers that sleep, and compared with the simulated one.
    """
    from shoal.commands.bench_pipeline import measure_idle, measure_steps, print_tables

    results = measure_steps(batch_size, microbatches, rounds, steps)
    idle_shares = measure_idle() if idle else []
    if as_json:
        print(json.dumps({"results": results, "idle": idle_shares}))
    else:
        print_tables(results, idle_shares)


@app.command()
def ps(
    against: Annotated[str, typer.Option(help="ray, rpc, or both with a comma.")] = "ray,rpc",
    size: Annotated[str, typer.Option(help="Bytes of the weights, such as 100MB.")] = "100MB",
    rows: Annotated[int, typer.Option(min=1, help="Rows of 64 floats in a sparse pull.")] = 1000,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 15,
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of workers.")] = 2,
    replicas: Annotated[
        str | None, typer.Option(help="Compare numbers of replicas instead, such as 1,2,3.")
    ] = None,
    consistency: Annotated[
        str | None,
        typer.Option(
            help="strong, eventual, or both with a comma; with --replicas.",
            show_default="strong,eventual",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw what --replicas measures to this file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Milliseconds per round of a parameter server.

    Against Ray's example and torch.distributed.rpc: a push and pull of all weights, and a pull
    of some rows. With --replicas: ms a push, how far copies are apart, and what a killed server
    costs.
    """
    if replicas is not None:
        from shoal.commands.bench_ps_replicas import ReplicaBench

        words = "strong,eventual" if consistency is None else consistency
        bench = ReplicaBench(replicas, words, size, rounds, workers, svg)
        found = bench.run()
        print(json.dumps(found)) if as_json else bench.print(found)
        return
    if svg is not None:
        raise BadInput("--svg draws what --replicas measures: add --replicas 1,2,3")
    if consistency is not None:
        raise BadInput("--consistency is that of replicas: add --replicas 1,2,3")
    from shoal.commands.bench_ps import measure, print_table

    document = measure(against.split(","), size, rows, rounds, workers)
    print(json.dumps(document)) if as_json else print_table(document)


@app.command(name="rows")
def hot_rows(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a row.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Ids drawn for a pull.")] = 16_384,
    exponent: Annotated[float, typer.Option(help="The power law of ids.")] = 1.1,
    share: Annotated[float, typer.Option(help="Rows over this share of pulls are copied.")] = 2e-5,
    cache: Annotated[int, typer.Option(min=1, max=1024, help="Steps that workers keep rows.")] = 4,
    servers: Annotated[int, typer.Option(min=2, help="Number of servers.")] = 4,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Number of workers.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 9,
    pulls: Annotated[int, typer.Option(min=1, help="Pulls of a worker in a round.")] = 20,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="LAB",
            help="Run on the hosts of a lab: lab or lab://NAME (see shoal lab).",
            show_default="this host",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Pulls per second of rows that follow a power law, and the load of servers.

    Each server owns a range of the rows. Rows are asked of their owners, or hot rows of all
    servers, with and without rows that workers keep; alternately in one run. In a lab (--on lab)
    workers and servers are on several hosts, and the busiest link bounds the speed.
    """
    from shoal.commands.bench_rows import RowsBench, measure
    from shoal.commands.bench_rows_table import print_table

    warmup = int(8 / share / batch) + 20  # until hot rows are known
    bench = RowsBench(rows, dim, batch, pulls, rounds, warmup, cache, exponent, share)
    document = measure(bench, workers, servers, on)
    print(json.dumps(document)) if as_json else print_table(document)


@app.command()
def predict(
    models: Annotated[
        str, typer.Option(help="gpt, gpt-medium, gpt-large, mlp, mlp-small, with commas.")
    ] = "gpt,mlp",
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of workers.")] = 2,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="A strategy; repeatable.", show_default="eight"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each strategy, in turns.")] = 3,
    cluster: Annotated[
        str | None,
        typer.Option(help="A cluster file.", show_default="this machine, measured once"),
    ] = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Predicted step times against measured ones, on this machine.

    Calibrate first, on a quiet machine: `shoal cluster calibrate`. Every prediction has the spread
    of the figures it was made from.
    """
    from shoal.calibration.cache import calibrated_cluster
    from shoal.cluster.presets import load_cluster
    from shoal.commands.bench_predict import (
        STRATEGIES,
        PredictBench,
        document,
        print_table,
        print_total,
    )
    from shoal.commands.bench_predict import measure as measure_predictions

    bench = PredictBench(workers, tuple(strategies or STRATEGIES), rounds, device)
    bench.check()
    machine = load_cluster(cluster) if cluster else calibrated_cluster(say=say, device=device)
    names = [name for name in models.split(",") if name]
    show = (lambda verdict: None) if as_json else print_table
    verdicts = measure_predictions(bench, names, machine, show)
    print(json.dumps(document(verdicts, machine))) if as_json else print_total(verdicts)


def _measure(name: str, workers: int, rounds: int, device: str | None) -> Any:
    batch_size, steps = WORKLOADS[name]
    asked = {"workload": name, "batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy_for(None, workers), device=device)
    return measure_in_workers("shoal.bench.step", asked, workers, config)


def _print(results: list[Any]) -> None:
    wide_console().print(_table(results))
    print("peer / shoal above 1: Shoal is faster")


def _table(results: list[Any]) -> Table:
    heads = ["workload", "peer", "workers", "param-\neters", "shoal", "peer", "peer /\nshoal"]
    table = plain_table("ms a step: median (quartiles)", heads, left=2)
    for r in results:
        table.add_row(
            r["workload"],
            "DDP" if r["workers"] > 1 else r["peer"],
            str(r["workers"]),
            f"{r['parameters']:,}",
            spread(r["shoal"], "_ms"),
            spread(r["theirs"], "_ms"),
            spread(r["ratio"], ""),
        )
    return table
