"""Measure what joins hosts, on hosts that an engine lends: all-reduces over TCP and over Gloo."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

import shoal
from shoal.calibration.device import measured_calls
from shoal.calibration.kernels import Sample, alternate
from shoal.calibration.measure import check_seconds, found_by
from shoal.calibration.worker import report
from shoal.cluster import Cluster
from shoal.cluster.hardware import MeasuredCalls
from shoal.comm.call import Call
from shoal.comm.executors.hierarchical.collectives import InterHost
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.network import BETWEEN, HostNetwork, in_ring_order, open_links
from shoal.comm.select import exchange_over, shared_store
from shoal.errors import BadInput
from shoal.launch.here.local import LaunchSpec
from shoal.launch.hosts.machines import Machines
from shoal.launch.hosts.remote import run_remote
from shoal.runtime.config import RunConfig
from shoal.runtime.wording import counted
from shoal.transport.shm.memfd import Exchange
from shoal.transport.tcp.transport import is_built

MODULE = "shoal.calibration.between"
Found = Mapping[str, Any]


def calibrate_between(
    machines: Machines, config: RunConfig, cluster: Cluster, workers: int, seconds: float
) -> Cluster:
    """The same cluster with what was measured between its nodes."""
    check_seconds(seconds)
    config = replace(config, strategy="ddp", between=None)
    command = [sys.executable, "-m", MODULE, "--seconds", str(seconds)]
    spec = LaunchSpec(command, workers, config)
    found = found_by(lambda write: run_remote(machines, spec, write))
    return replace(cluster, between=calls_between(found, workers))


def calls_between(found: Found, workers: int) -> tuple[MeasuredCalls, ...]:
    """BadInput where workers were not on several hosts, equally many on each."""
    if found["hosts"] < 2:
        raise BadInput(
            f"{counted(workers, 'worker')} on one host: nothing was measured between hosts; give "
            "--workers a multiple of the number of hosts"
        )
    if not found["even"]:
        raise BadInput(
            f"{workers} workers are not equally many on each of {found['hosts']} hosts: take "
            "another number with --workers"
        )
    return tuple(measured_calls(calls, found["hosts"]) for calls in found["calls"])


SIZES = (1 << 10, 1 << 15, 1 << 20, 1 << 24)
_ROUNDS = 7
_MOST_CALLS = 50
_TIMEOUT_S = 300.0


def measure(job: shoal.Job, seconds: float) -> dict[str, Any]:
    """Seconds of each size by transport; without hosts to measure between it says how many."""
    config = RunConfig.from_environment()
    store = shared_store("calibration between hosts", job.rank, job.size)
    exchange = exchange_over(store, job.rank, job.size)
    network = HostNetwork(config, master=config.environ.get("MASTER_ADDR"))
    topology = Topology.of(exchange(host_id(config.host_id)), job.rank)
    found: dict[str, Any] = {"hosts": len(topology.hosts), "even": topology.is_even, "calls": []}
    if len(topology.hosts) < 2 or not topology.is_even:
        return found
    topology = in_ring_order(topology, network, exchange)
    with ExitStack() as stack:
        ways: dict[str, InterHost] = {}
        for name in usable(config, exchange):
            own = PrefixStore(name, store)
            links = open_links(name, topology, own, exchange, _TIMEOUT_S, network)
            stack.callback(links.close)
            between = links.inter_host()
            assert between is not None  # hosts have equally many ranks
            stack.callback(between.close)
            ways[name] = between
        found["calls"] = _measured(ways, exchange, seconds)
    return found


def usable(config: RunConfig, exchange: Exchange) -> list[str]:
    """What all ranks may use. Gloo cannot ask for a key, so it needs a trusted network."""
    can = {"tcp": is_built(), "gloo": config.tls.trusted_network}
    said = exchange(",".join(name for name in BETWEEN if can[name]).encode())
    return [name for name in BETWEEN if all(name.encode() in words.split(b",") for words in said)]


def _measured(
    ways: dict[str, InterHost], exchange: Exchange, seconds: float
) -> list[dict[str, Any]]:
    points: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    each_s = seconds / len(SIZES)
    for num_bytes in SIZES:
        data = torch.zeros(num_bytes // 4)
        calls = {
            name: partial(way.run, Call("all_reduce", data, data)) for name, way in ways.items()
        }
        meet = partial(next(iter(ways.values())).run, Call("barrier"))
        # of one call of any way, on any rank: all of them make equally many calls then
        own_ms = max(ms for rounds in alternate(calls, 1, 1, meet).values() for ms in rounds)
        slowest_s = max(float(text) for text in exchange(f"{own_ms:.6f}".encode())) / 1e3
        steps = max(1, min(_MOST_CALLS, int(each_s / max(1e-9, _ROUNDS * len(calls) * slowest_s))))
        times_ms = alternate(calls, _ROUNDS, steps, meet)
        for name, rounds_ms in times_ms.items():
            sample = Sample.of([ms / 1e3 for ms in rounds_ms])
            points[name].append({"bytes": num_bytes, **sample._asdict()})
    exchange(b"end")  # before connections are closed
    return [{"executor": name, "points": rows} for name, rows in points.items()]


if __name__ == "__main__":
    report(measure)
