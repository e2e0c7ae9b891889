"""`python -m benchmarks`: Shoal measured against other libraries, alternately in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness import FASTER, check_names, say
from benchmarks.validation.goodput import goodput
from benchmarks.validation.published_report import published
from benchmarks.validation.report import validate
from shoal.commands import options
from shoal.commands.cli import new_app, run_app
from shoal.commands.output import show
from shoal.errors import BadInput

app = new_app("Measure Shoal against other libraries.")
app.command()(validate)
app.command()(published)
app.command()(goodput)
WORKLOADS = ("digits", "gpt", "mlp", "mlp-small")
_ON_CUDA = ("gpt2-8", "gpt2-32", "gpt2-8-compiled", "gpt2-32-compiled")
MODELS = ("mlp-16", "mlp-64", "digits", "mlp-256", "gpt", *_ON_CUDA)


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
    from benchmarks.step import run, table_of

    check_names("--workload", workload or (), WORKLOADS)
    names = workload or ["digits", "gpt", "mlp"]
    results = [run(name, n, rounds, device) for n in workers or [1, 2] for name in names]
    show({"results": results}, [table_of(results), FASTER], as_json)


@app.command()
def overhead(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(MODELS)}; repeatable.", show_default="all"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 15,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """What `job.step` costs beside the computing, on one device.

    The plain PyTorch loop and `single`, from models of a few thousand parameters to, on a GPU,
    GPT-2; with the device waited for after each step and after a round of steps.
    """
    from benchmarks.overhead import cases, run, table_of

    check_names("--model", model or (), MODELS)
    results = run(model or cases(device), rounds, device)
    show({"results": results}, [table_of(results), FASTER], as_json)


@app.command()
def gpu(
    workers: Annotated[int, typer.Option("--workers", "-n", min=2, help="Number of workers.")] = 2,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Repeatable.",
            show_default="ddp, zero(2), zero(3), tp(N) and pp(N)",
        ),
    ] = None,
    size: Annotated[str, typer.Option(help="Of the GPT: tiny, small, medium, large.")] = "large",
    rows: Annotated[int, typer.Option(min=1, help="Sequences of each worker.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Steps in each of two rounds.")] = 8,
    as_json: options.Json = False,
) -> None:
    """Milliseconds per step and memory on GPUs, over NCCL.

    ddp against DistributedDataParallel, zero(2) and zero(3) against fully_shard (FSDP2), tp against
    DTensor's parallelize_module, pp against torch.distributed.pipelining, and cp, where it is
    asked for, against context_parallel. Ranks have a GPU each, or share what there is.
    """
    from benchmarks.gpu import run, table_of
    from shoal.commands.examples.gpt import SIZES

    check_names("--size", [size], SIZES)
    if not torch.cuda.is_available():
        raise BadInput("this benchmark needs a CUDA GPU, and PyTorch sees none")
    splits = [f"tp({workers})", f"pp({workers}, microbatches=4)"]
    chosen = strategy or ["ddp", "zero(2)", "zero(3)", *splits]
    found = run(chosen, workers, size, rows, steps)
    show({"results": found}, [table_of(found, workers)], as_json)


@app.command()
def host(
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", "-n", min=2, help="Repeatable.", show_default="2"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Repeatable.",
            show_default="ddp, ddp without shared weights, zero(2), ps, gossip",
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="sgd or adamw; repeatable.", show_default="both")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 512,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 15,
    as_json: options.Json = False,
) -> None:
    """One process with all cores against workers that share them, the same global batch."""
    from benchmarks.host import OPTIMIZERS, Way, bound_of, run, table_of

    check_names("--optimizer", optimizer or (), OPTIMIZERS)
    named = strategy or ["ddp", "ddp(shared_weights=False)", "zero(2)", "ps", "gossip"]
    ways = [Way("plain loop", 1), Way("single", 1)]
    for n in workers or [2]:
        shared = [Way(each, n) for each in ("torch DDP", *named)]
        ways += [*dict.fromkeys(map(bound_of, shared)), *shared]
    results = []
    for name in optimizer or OPTIMIZERS:
        results += run(ways, name, batch_size, rounds, steps)
    show({"results": results}, [table_of(results)], as_json)


@app.command()
def start(
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", "-n", min=1, help="Repeatable.", show_default="1, 2, 4 and 8"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Seconds until workers of this host have made their first step, and four of them.

    One plain process, torchrun with DistributedDataParallel, and `shoal run` that forks or spawns
    its workers; beside `import torch` alone, which no way could do without.
    """
    from benchmarks.start import run, table_of

    results = run(workers or [1, 2, 4, 8], rounds)
    show({"results": results}, [table_of(results)], as_json)


@app.command()
def checkpoint(
    size: Annotated[str, typer.Option(help="Bytes of the model, such as 500MB.")] = "500MB",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 7,
    folder: Annotated[
        Path | None,
        typer.Option(help="On the disk to measure.", show_default="that of temporary files"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Seconds to save and to load a model, and how long a save holds training up.

    `job.save`, waiting and in the background, and `job.load` against torch.save, torch.load and
    torch.distributed.checkpoint; beside dd with conv=fsync and a copy in memory.
    """
    from benchmarks.checkpoint import run, tables
    from shoal.cluster.units import parse_bytes

    found = run(parse_bytes(size), rounds, folder)
    show(found, tables(found), as_json)


@app.command()
def data(
    samples: Annotated[int, typer.Option(min=1, help="Samples in an epoch.")] = 8192,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 9,
    as_json: options.Json = False,
) -> None:
    """Microseconds a batch of `job.batches` and of torch's DataLoader.

    With no worker processes and with two: tensors, a dataset in Python whose samples are cheap,
    take time or draw noise, and a collate function.
    """
    from benchmarks.data import run, table_of

    results = run(samples, batch_size, rounds)
    show({"results": results}, [table_of(results), FASTER], as_json)


@app.command()
def trace(
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", "-n", min=1, help="Repeatable.", show_default="2"),
    ] = None,
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "gpt",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; results are medians over them.")] = 31,
    strategy: options.Strategy = None,
    as_json: options.Json = False,
) -> None:
    """What `--trace` costs a step: with a trace and without, in turns."""
    from benchmarks.trace import run, table_of

    check_names("--workload", [workload], WORKLOADS)
    results = [run(workload, n, rounds, strategy) for n in workers or [2]]
    show({"results": results}, [table_of(results)], as_json)


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
    from benchmarks.hosts import run, table_of

    found = run(lab, ranks, size, rounds)
    largest = f"largest error of a prediction: {100 * found['largest_error']:.1f}%"
    show(found, [table_of(found), largest], as_json)


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
    from benchmarks.collectives import run, tables

    results = run(against.split(","), ranks, sizes, kinds, rounds)
    show({"results": results}, tables(results), as_json)


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

    Against torch.distributed.pipelining, alternately in the same two processes, with the peak
    memory of each stage. The idle share is traced on layers that sleep, and compared with the
    simulated one.
    """
    from benchmarks.pipeline import THEIRS, run, tables
    from benchmarks.pipeline_idle import SCHEDULES, compare

    results = [run(name, batch_size, microbatches, rounds, steps) for name in THEIRS]
    idle_shares = [compare(name) for name in SCHEDULES] if idle else []
    show({"results": results, "idle": idle_shares}, tables(results, idle_shares), as_json)


@app.command()
def ps(
    against: Annotated[str, typer.Option(help="ray, rpc, sockets, with commas.")] = "ray,rpc",
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

    Against Ray's example, torch.distributed.rpc, or, over TCP, sockets that exchange the same
    bytes: a push and pull of all weights, and a pull of some rows. With --replicas: ms a push,
    how far copies are apart, and what a killed server costs.
    """
    if replicas is not None:
        from benchmarks import ps_replicas_report as report

        words = "strong,eventual" if consistency is None else consistency
        found = report.ReplicaBench(replicas, words, size, rounds, workers, svg).run()
        show(found, [report.table_of(found), report.NOTE], as_json)
        return
    if svg is not None:
        raise BadInput("--svg draws what --replicas measures: add --replicas 1,2,3")
    if consistency is not None:
        raise BadInput("--consistency is that of replicas: add --replicas 1,2,3")
    from benchmarks.ps import run, table_of

    document = run(against.split(","), size, rows, rounds, workers)
    show(document, [table_of(document), FASTER], as_json)


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
    from benchmarks.rows_report import RowsBench, report, run

    warmup = int(8 / (share or 1.0) / batch) + 20  # until hot rows are known; 0 is refused
    bench = RowsBench(rows, dim, batch, pulls, rounds, warmup, cache, exponent, share)
    document = run(bench, workers, servers, on)
    show(document, report(document), as_json)


@app.command()
def rehearsed(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="The script and its arguments.", show_default="benchmarks/paced.py"),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option("--strategy", "-s", help="Repeatable.")
    ] = None,
    slow: Annotated[str, typer.Option(help="RANK:Fx; empty: none.")] = "3:3x",
    until: Annotated[float | None, typer.Option(help="A loss to reach.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each strategy.")] = 2,
    as_json: options.Json = False,
) -> None:
    """`shoal rehearse` beside runs in the lab that is up (`shoal lab up`)."""
    from benchmarks.rehearsed import PACED, STRATEGIES, run, table_of

    results = run(strategy or STRATEGIES, words or [PACED], slow, until, rounds)
    show({"results": results}, [table_of(results)], as_json)


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
    from benchmarks.predict import (
        STRATEGIES,
        PredictBench,
        document,
        report,
        run,
        total,
    )
    from shoal.cluster.presets import load_cluster
    from shoal.observe.calibration.measure import calibrated_cluster

    bench = PredictBench(workers, tuple(strategies or STRATEGIES), rounds, device)
    bench.check()
    machine = load_cluster(cluster) if cluster else calibrated_cluster(say=say, device=device)
    names = [name for name in models.split(",") if name]
    verdicts = []
    for verdict in run(bench, names, machine):
        verdicts.append(verdict)
        show(None, [] if as_json else report(verdict), as_json=False)
    show(document(verdicts, machine), total(verdicts), as_json)


@app.command()
def rehearse(
    workers: Annotated[
        list[int] | None,
        typer.Option("--workers", "-n", min=1, help="Repeatable.", show_default="4, 16 and 64"),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="digits, clicks or mlp; repeatable.", show_default="all"),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", "-s", help="Repeatable.", show_default="ddp, ps, gossip and async ps"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; results are medians over them.")] = 3,
    as_json: options.Json = False,
) -> None:
    """Processor time of a rehearsal over that of its gradients.

    Of digits, clicks and a network of 5 million parameters, with all virtual workers in one
    process; gradients alone are computed by a plain loop in the same run.
    """
    from benchmarks.rehearse import CASES, STRATEGIES, run, table_of

    check_names("--case", case or (), CASES)
    results = []
    for found in run(
        list(case or CASES), list(strategy or STRATEGIES), workers or [4, 16, 64], steps, rounds
    ):
        say(f"{found['case']}, {found['strategy']}, {found['workers']}: {found['ratio']:.2f}")
        results.append(found)
    show({"results": results}, [table_of(results)], as_json)


@app.command()
def rehearse_table(
    file: Annotated[
        Path, typer.Option(help="Where cells are kept; those that are there are not run again.")
    ] = Path("rehearse-table.jsonl"),
    cluster: Annotated[
        list[str] | None,
        typer.Option(help="one-rack, racks or two-sites; repeatable.", show_default="all"),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(
            "--workers", "-n", min=2, help="Repeatable.", show_default="4, 16, 64 and 256"
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Repeatable.", show_default="ten"),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Virtual seconds to a loss, of ten strategies on three clusters.

    One rack; racks with uplinks 1:4 and a worker that is four times slower; two sites over
    100 Mb/s. The model is that of benchmarks/rehearse_script.py.
    """
    from benchmarks.rehearse_table import CLUSTERS, STRATEGIES, WORKERS, run, table_of

    check_names("--cluster", cluster or (), CLUSTERS)
    numbers = workers or list(WORKERS)
    cells = list(run(file, cluster or CLUSTERS, numbers, strategy or STRATEGIES))
    tables = [table_of(cells, name, numbers) for name in cluster or CLUSTERS]
    show({"cells": cells}, tables, as_json)


if __name__ == "__main__":
    run_app(app, "python -m benchmarks")
