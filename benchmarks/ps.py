"""What a parameter server costs: Shoal's, Ray's example, torch.distributed.rpc, plain sockets.

`python -m benchmarks ps` starts the workers of one run. Each peer is measured alternately with
Shoal and then closed, because an idle peer still takes CPU time (torch's agents poll). A dense
round is a push of gradients by every worker, one SGD step, and a pull of the new weights by every
worker. A sparse pull asks for rows of a table; all workers ask at once. Beside plain sockets,
which exchange the same bytes and do nothing with them, Shoal's server is used over TCP.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

import shoal
from benchmarks.harness import (
    alternate,
    beside_peer,
    check_names,
    measure_in_workers,
    peer_cells,
    say,
    write_result,
)
from benchmarks.ps_peers import LR, RayPeer, RpcPeer, SocketPeer, serve_rpc, serve_sockets
from shoal.cluster.units import parse_bytes
from shoal.comm.objects import all_gather_bytes
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.runtime.config import RunConfig
from shoal.runtime.memory_limit import keep_freed_memory, threads_of
from shoal.server.embedding.module import RowStore
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.process.server import Server
from shoal.sync import Replica, Sync, plan_for
from shoal.sync.optimizer_step import OptimizerStep

PEERS = ("ray", "rpc", "sockets")
TABLE_ROWS = 1_000_000
DIM = 64
Ways = dict[str, Callable[[], Any]]


class Ours:
    """One worker of Shoal's parameter server, with one tensor for a model."""

    def __init__(self, job: shoal.Job, numel: int, servers: tuple[str, ...] = ()):
        """`servers`: addresses of others than those of the run."""
        config = RunConfig.from_environment()
        if servers:
            config = replace(config, servers=servers)
        self.parameter = nn.Parameter(torch.zeros(numel))
        self.gradient = torch.ones(numel)
        self.flat = FlatParams([("weight", self.parameter)])
        update = OptimizerStep(self.flat.named, partial(torch.optim.SGD, lr=LR))
        plan = plan_for(job.strategy.sync_for(job.size), job.size)
        self.sync: Sync = plan.build(Replica(self.flat, update, job.group, config=config))
        self.sync.batch_fraction = 1 / job.size
        store: RowStore | None = self.sync.row_store()
        assert store is not None
        self.table = store.create(
            TableSpec("rows", TABLE_ROWS, DIM, optimizer=RowOptimizer("sgd", LR))
        )

    def dense(self) -> None:
        self.sync.begin()
        self.parameter.grad = self.gradient
        self.flat.grads.arm(self.sync.reduce)
        self.flat.grads.flush()
        self.sync.finish()

    def sparse(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.pull(ids)


def measure(job: shoal.Job, args: argparse.Namespace) -> Any:
    torch.set_num_threads(1)
    peers = [peer for peer in args.against.split(",") if peer]
    ids = torch.randint(0, TABLE_ROWS, (args.rows,), generator=job.generator)
    ours = Ours(job, args.bytes // 4)
    try:
        results = [_beside(job, args, ours, peer, ids) for peer in peers or [None]]
    finally:
        ours.sync.close()
    return {"workers": job.size, "bytes": args.bytes, "rows": args.rows, "results": results}


def _beside(
    job: shoal.Job, args: argparse.Namespace, ours: Ours, peer: str | None, ids: torch.Tensor
) -> dict[str, Any]:
    """Shoal and one peer, or Shoal alone."""
    dense: Ways = {"shoal": ours.dense}
    sparse: Ways = {"shoal": lambda: ours.sparse(ids)}
    barrier = partial(_barrier, job)
    with ExitStack() as stack:
        if peer is not None:
            _ADD[peer](stack, job, args.bytes // 4, ids, dense, sparse)
        return {
            "peer": peer,
            "dense": beside_peer(alternate(dense, args.rounds, 5, barrier, barrier)),
            "sparse": beside_peer(alternate(sparse, args.rounds, 20, barrier, barrier)),
        }


def _barrier(job: shoal.Job) -> None:
    job.group.barrier().wait()


def _add_rpc(
    stack: ExitStack, job: shoal.Job, numel: int, ids: torch.Tensor, dense: Ways, sparse: Ways
) -> None:
    run_dir = RunConfig.from_environment().run_dir
    if run_dir is None:
        raise BadInput("start this benchmark with `python -m benchmarks ps`")
    method = f"file://{run_dir.path}/rpc"
    if job.rank == 0:
        words = ["--serve-rpc", method, "--workers", str(job.size), "--bytes", str(numel * 4)]
        server = subprocess.Popen([sys.executable, "-m", "benchmarks.ps", *words])
        stack.callback(server.wait)
        stack.callback(server.terminate)
    peer = RpcPeer(job.rank, job.size, method)
    stack.callback(peer.close)
    gradient = torch.ones(numel)
    weights = torch.zeros(numel)
    dense["peer"] = lambda: weights.copy_(peer.dense(gradient))
    sparse["peer"] = lambda: peer.sparse(ids)


def _add_ray(
    stack: ExitStack, job: shoal.Job, numel: int, ids: torch.Tensor, dense: Ways, sparse: Ways
) -> None:
    """Ray starts its own workers; rank 0 drives them, and the other ranks do nothing."""
    dense["peer"] = lambda: None
    sparse["peer"] = lambda: None
    if job.rank == 0:
        peer = RayPeer(job.size, numel, TABLE_ROWS, DIM)
        stack.callback(peer.close)
        wanted = ids.numpy()
        dense["peer"] = peer.dense
        sparse["peer"] = lambda: peer.sparse(wanted)


def _add_sockets(
    stack: ExitStack, job: shoal.Job, numel: int, ids: torch.Tensor, dense: Ways, sparse: Ways
) -> None:
    said = b""
    if job.rank == 0:
        words = ["--serve-sockets", "--bytes", str(numel * 4), "--rows", str(len(ids))]
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ps", *words],
            env={**os.environ, **threads_of(1)},
            stdout=subprocess.PIPE,
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert server.stdout is not None
        said = server.stdout.readline()
    address, port = all_gather_bytes(job.group, said)[0].decode().split()
    ours = Ours(job, numel, (address,))
    stack.callback(ours.sync.close)
    dense["shoal"] = ours.dense
    sparse["shoal"] = lambda: ours.sparse(ids)
    for ways, kind, given, taken in (
        (dense, b"d", torch.ones(numel), torch.zeros(numel)),
        (sparse, b"s", ids, torch.zeros(len(ids), DIM)),
    ):
        peer = SocketPeer(int(port), kind, given, taken)
        stack.callback(peer.close)
        ways["peer"] = peer.exchange


def _serve_sockets(num_bytes: int, rows: int) -> None:
    """Shoal's server over TCP and a plain one, in a process that rank 0 ends."""
    keep_freed_memory()
    config = RunConfig.from_environment()
    secret = config.read_secret()
    assert secret is not None
    server = Server("tcp:127.0.0.1:0", secret)
    server.host.most_threads = config.num_threads  # as in `server/main.py`
    with server, socket.create_server(("127.0.0.1", 0)) as raw:
        print(server.address, raw.getsockname()[1], flush=True)
        serve_sockets(raw, num_bytes, (8 * rows, 4 * DIM * rows))


_ADD = {"rpc": _add_rpc, "ray": _add_ray, "sockets": _add_sockets}


def run(against: list[str], size: str, rows: int, rounds: int, workers: int) -> Any:
    against = [peer for peer in against if peer]
    check_names("--against", against, PEERS)
    if "ray" in against and importlib.util.find_spec("ray") is None:
        say("ray is not measured: it is not installed (pip install ray)")
        against.remove("ray")
    say(f"measuring {workers} workers and a server")
    options = {
        "bytes": parse_bytes(size),
        "rows": rows,
        "rounds": rounds,
        "against": ",".join(against),
    }
    config = config_for(strategy_for("ps", workers), device="cpu")
    return with_speeds(measure_in_workers("benchmarks.ps", options, workers, config))


def with_speeds(document: dict[str, Any]) -> dict[str, Any]:
    """Beside each time of a sparse pull: the rows that a worker gets in a second."""
    for result in document["results"]:
        times = {way: t for way, t in result["sparse"].items() if way != "ratio"}
        result["rows_per_s"] = {
            way: document["rows"] / (timing["median_ms"] / 1e3) for way, timing in times.items()
        }
    return document


def table_of(document: dict[str, Any]) -> Table:
    heads = ["peer", "operation", "shoal", "peer", "peer /\nshoal", "rows/s"]
    dense = f"push, pull {document['bytes'] / 1e6:.0f} MB"
    rows = []
    for result in document["results"]:
        peer = result["peer"] or ""
        speeds = "\nagainst ".join(f"{speed:,.0f}" for speed in result["rows_per_s"].values())
        rows.append([peer, dense, *peer_cells(result["dense"]), ""])
        pull = f"pull {document['rows']:,} rows"
        rows.append([peer, pull, *peer_cells(result["sparse"]), speeds])
    title = f"{document['workers']} workers, one server: ms, medians (quartiles)"
    return plain_table(title, heads, rows, left=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", default="")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--serve-rpc")
    parser.add_argument("--serve-sockets", action="store_true")
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    if args.serve_rpc:
        torch.set_num_threads(1)
        serve_rpc(args.workers, args.serve_rpc, args.bytes // 4, TABLE_ROWS, DIM)
        return
    if args.serve_sockets:
        _serve_sockets(args.bytes, args.rows)
        return

    write_result(lambda job: measure(job, args), args.result)


if __name__ == "__main__":
    main()
