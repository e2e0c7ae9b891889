"""What copies of a parameter server cost and give: `python -m benchmarks ps --replicas 1,2,3`.

In each worker of one run under ps(mode="async", replicas=…, consistency=…):

    pushes       all workers push at once; the time from the commit of a push to its answer
    copies       worker 0 reads one replica after the other while the others push: how many pushes
                 a copy lacks that another copy had shown before
    a slow copy  all push again while the last copy is stopped for 50 of each 60 ms
    a kill       worker 0 kills the head (server 0), and all push on: the longest push is the time
                 without service; a push that ends in an error is refused
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.harness import Timing, options_of_worker, write_result
from benchmarks.ps_peers import LR
from shoal.comm import objects
from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.runtime.config import RunConfig
from shoal.runtime.trace import server_name
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.link import ServerLink
from shoal.server.client.route import Request
from shoal.server.messages import Commit, Pull, Pulled
from shoal.server.protocol import FrameKind, decode, encode
from shoal.server.protocol.connection import Connection
from shoal.sync import Replica, plan_for
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.ps.worker import PsWorker

_ASK_S = 5.0


class CopyReader:
    """Connections of its own to all members but the one that this worker pulls from."""

    def __init__(self, link: ServerLink, route: ChainRoute):
        self._link = link
        self._route = route
        self._connections: dict[int, Connection] = {}

    def versions(self) -> list[int]:
        """What each member shows, the updates of its weights; in the order of the chain."""
        return [self._version(copy) for copy in self._route.view.members]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _version(self, copy: int) -> int:
        route = self._route
        request = Request(FrameKind.PULL, encode(Pull(None, 0)), into=None)
        if route.server("pull") == server_name(route.index, copy):
            return decode(self._link.post("pull", request).result().meta, Pulled).version
        if copy not in self._connections:
            self._connections[copy] = route.connect_copy(copy, "pull", _ASK_S)
        connection = self._connections[copy]
        return decode(route.ask(connection, request), Pulled).version


_MAX_BYTES = 1 << 20
_WARM_UP = 10
STOPPED_S, GOING_S = 0.05, 0.01  # in turn: a copy that is slow


class Pusher:
    """One worker that pushes one tensor again and again."""

    def __init__(self, job: shoal.Job, numel: int):
        self.flat = FlatParams([("weight", nn.Parameter(torch.zeros(numel)))])
        update = OptimizerStep(self.flat.named, partial(torch.optim.SGD, lr=LR))
        plan = plan_for(job.strategy.sync_for(job.size), job.size)
        sync = plan.build(
            Replica(self.flat, update, job.group, config=RunConfig.from_environment())
        )
        assert isinstance(sync, PsWorker)
        self.sync = sync
        self.client = sync.client
        self.fraction = 1 / job.size
        self.step = 0
        self.acknowledged = 0
        self.refused = 0
        spec = self.client.specs[0]
        self.loss_flags = torch.ones(1, 1 + spec.parameters, dtype=self.flat.grads.header.dtype)
        self.client.out.fill_(1e-6)
        (link,) = self.client.links
        route = link.route
        self.copies = CopyReader(link, route) if isinstance(route, ChainRoute) else None

    def push(self) -> float:
        """Seconds until it is acknowledged."""
        began_s = time.monotonic()
        try:
            self.client.push(slice(0, self.client.size))
            commit = Commit(self.step, 0, self.fraction, None)
            ack = self.client.commit(commit, self.loss_flags)
            self.client.settle(ack.position)
            self.client.wait_settled()
            self.acknowledged += 1
        except ShoalError:
            self.refused += 1
        self.step += 1
        return time.monotonic() - began_s

    def versions(self) -> list[int]:
        """Of each copy, one after the other."""
        return self.copies.versions() if self.copies is not None else []


def measure(job: shoal.Job, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    pusher = Pusher(job, args.bytes // 4)
    try:
        for _ in range(_WARM_UP):
            pusher.push()
        job.group.barrier().wait()
        pushes_s = [pusher.push() for _ in range(args.rounds)]
        job.group.barrier().wait()
        lag = _lag(job, pusher, args.rounds)
        job.group.barrier().wait()
        slow_s = _beside_slow_copy(job, pusher, args)
        longest_s = _without_service_s(job, pusher, args)
        job.group.barrier().wait()
        version = pusher.client.pull(None, 0).wait().version
        own = [pusher.acknowledged, pusher.refused, longest_s]
        told = objects.all_gather_bytes(job.group, json.dumps(own).encode(), _MAX_BYTES)
    finally:
        if pusher.copies is not None:
            pusher.copies.close()
        pusher.sync.close()
    acknowledged, refused, waited_s = zip(*map(json.loads, told), strict=True)
    return {
        "push": asdict(Timing.of([1e3 * seconds for seconds in pushes_s])),
        "push_slow_copy": asdict(Timing.of([1e3 * s for s in slow_s])) if slow_s else None,
        "largest_lag": lag,
        "acknowledged": sum(acknowledged),
        "refused": sum(refused),
        "undone": max(0, sum(acknowledged) - version),
        "without_service_s": max(waited_s) if args.replicas > 1 else None,
    }


def _lag(job: shoal.Job, pusher: Pusher, rounds: int) -> int:
    """How many pushes a copy lacked that another one had shown before."""
    if job.rank:
        for _ in range(rounds):
            pusher.push()
        return 0
    largest = 0
    shown = 0
    for _ in range(max(4, rounds // 4)):
        for version in pusher.versions():
            largest = max(largest, shown - version)
            shown = max(shown, version)
    return largest


def _beside_slow_copy(job: shoal.Job, pusher: Pusher, args: argparse.Namespace) -> list[float]:
    if args.replicas == 1:
        return []
    with _held_up(_pid_of_server(args.replicas - 1) if job.rank == 0 else None):
        job.group.barrier().wait()
        pushes_s = [pusher.push() for _ in range(args.rounds)]
        job.group.barrier().wait()
    return pushes_s


@contextmanager
def _held_up(pid: int | None) -> Iterator[None]:
    """The process is stopped for most of the time while the block runs."""
    is_over = threading.Event()

    def stop_and_go(pid: int) -> None:
        with suppress(ProcessLookupError):
            while not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                is_over.wait(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                is_over.wait(GOING_S)

    thread = threading.Thread(target=stop_and_go, args=(pid,))
    if pid is not None:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if pid is not None:
            thread.join()


def _pid_of_server(number: int) -> int | None:
    run_dir = RunConfig.from_environment().run_dir
    return None if run_dir is None else run_dir.read_server_pid(number)


def _without_service_s(job: shoal.Job, pusher: Pusher, args: argparse.Namespace) -> float:
    pid = _pid_of_server(0) if args.replicas > 1 and job.rank == 0 else None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return max(pusher.push() for _ in range(args.rounds))


def main() -> None:
    args = options_of_worker(bytes=int, rounds=int, replicas=int)
    write_result(lambda job: measure(job, args), args.result)


if __name__ == "__main__":
    main()
