"""A rehearsal: virtual workers and servers of one strategy, from their start to their end."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.cluster import Cluster
from shoal.comm.group import Group
from shoal.comm.tracing import Traced
from shoal.errors import BadInput, StopTraining
from shoal.plan.simulator.step_tasks import Unevenness
from shoal.protocol.endpoint import replaced_sockets
from shoal.rehearse.executor import Virtual, VirtualRanks
from shoal.rehearse.network import VirtualNetwork
from shoal.rehearse.pace import Pace, PacedRecorder, ServerPace, WorkerTimes
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.sockets import VirtualProcess, VirtualSockets
from shoal.rehearse.threading_like import VirtualClock
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.launched_worker import seed_python
from shoal.runtime.trace import Recorder, Trace, server_name
from shoal.server.process.server import Server
from shoal.strategy.strategy import Strategy
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.throughput import StepRecord

Train = Callable[[Job], Any]


@dataclass(frozen=True)
class RehearsalSpec:
    """`times` are of one worker alone; `uneven` makes them differ."""

    strategy: Strategy
    workers: int
    cluster: Cluster
    times: WorkerTimes
    uneven: Unevenness
    seed: int = 0
    steps: int | None = None
    slow_servers: Mapping[int, float] = field(default_factory=dict)  # how many times slower
    is_shown: bool = False  # what the script and its first worker print


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal came to; times are virtual, from its start."""

    seconds: float
    reports: list[dict[str, Any]]  # of each worker, as those of a run
    results: list[Any]  # what each training function has returned
    link_bytes: dict[str, float]
    spans: Trace


def rehearse(train: Train, spec: RehearsalSpec) -> Rehearsed:
    """Run `train(job)` on virtual workers; the same call gives the same bits and times."""
    return _Rehearsal(train, spec).run()


class _Rehearsal:
    def __init__(self, train: Train, spec: RehearsalSpec):
        self._train = train
        self.spec = spec
        term: Any = spec.strategy.sync_for(spec.workers)
        spec.strategy.require_built()
        self._layout = spec.strategy.layout(spec.workers)
        servers = spec.strategy.servers(spec.workers)
        self._refuse(term)
        self.server_devices = _devices_of_servers(spec.cluster, spec.workers, servers)
        devices = 1 + max([spec.workers - 1, *self.server_devices])
        cluster = spec.cluster.of_size(devices)
        spec.strategy.check_hosts(spec.workers, spec.workers > cluster.node.devices)
        self.time = VirtualTime()
        self.network = VirtualNetwork(cluster, self.time)
        algorithm = term.collective_algorithm or "auto"
        self.exchange = VirtualRanks(self.network, self.time, range(spec.workers), algorithm)
        self._reports: dict[int, dict[str, Any]] = {}
        self._results: dict[int, Any] = {}
        self._recorders: list[Recorder] = []
        self._models: set[nn.Module] = set()
        self._secret = secrets.token_bytes(32)

    def _refuse(self, term: Any) -> None:
        """What a rehearsal cannot do yet."""
        if self.spec.strategy.is_elastic or getattr(term, "replicas", 1) > 1:
            raise BadInput(
                f"{self.spec.strategy} survives lost workers or servers, and a rehearsal does not "
                "lose any yet: leave out elastic and replicas"
            )

    def run(self) -> Rehearsed:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums have the same order on every machine
        try:
            sockets = VirtualSockets(self.network, self.time)
            with (
                clock.replaced(VirtualClock(self.time)),
                replaced_sockets(sockets),
                _silent(self.spec.is_shown),
            ):
                self.time.run(self._body)
        finally:
            torch.set_num_threads(threads)
        spans: Trace = {recorder.process: recorder.spans for recorder in self._recorders}
        ranks = range(self.spec.workers)
        return Rehearsed(
            max((ns for report in self._reports.values() for ns in report["loss_s"]), default=0.0),
            [self._reports[rank] for rank in ranks],
            [self._results[rank] for rank in ranks],
            self.network.link_bytes,
            spans,
        )

    # ------------------------------------------------------------------ processes

    def _body(self) -> None:
        servers: list[Server] = []
        for index, device in enumerate(self.server_devices):
            starter = self.time.spawn(
                f"server {index}",
                partial(self._serve, index, servers),
                None,
                group=VirtualProcess(f"server {index}", device),
            )
            self.time.join(starter)
        self._addresses = tuple(server.address for server in servers)
        fibers = [
            self.time.spawn(
                f"rank {rank}",
                partial(self._work, rank),
                RandomState(),
                group=VirtualProcess(f"rank {rank}", rank),
            )
            for rank in range(self.spec.workers)
        ]
        for fiber in fibers:
            self.time.join(fiber)
        for server in servers:
            server.close()

    def _serve(self, index: int, started: list[Server]) -> None:
        server = Server(f"virtual:server-{index}", self._secret)
        server.host.slowness = ServerPace(
            self.time, self.spec.times.apply_s, self.spec.slow_servers.get(index, 1.0)
        )
        server.host.tracer = Recorder(server_name(index), 0)
        self._recorders.append(server.host.tracer)
        started.append(server)

    def _work(self, rank: int) -> None:
        spec = self.spec
        pace = Pace(self.time, spec.times, rank, spec.uneven)
        tracer = PacedRecorder(pace, rank)
        self._recorders.append(tracer)
        executor = Traced(Virtual(self.exchange, range(spec.workers), rank), tracer)
        devices = spec.cluster.node.devices
        config = replace(
            RunConfig(),
            servers=self._addresses or None,
            secret=self._secret,
            host_id=f"node-{rank // devices}",
            strategy=str(spec.strategy),
            seed=spec.seed,
        )
        local_size = min(devices, spec.workers - rank // devices * devices)
        services = RunServices(
            tracer=tracer,
            local_rank=rank % devices,
            local_size=local_size,
            config=config,
        )
        torch.manual_seed(spec.seed)
        seed_python(spec.seed)
        job = Job(
            spec.strategy,
            Group(executor),
            device=torch.device("cpu"),
            seed=spec.seed,
            services=services,
        )
        job.checkpoints.dry = True
        job.on_build.append(self._check_model)
        job.on_build.append(pace.watch)
        record = StepRecord(job)
        if spec.steps is not None:
            job.stop_after(spec.steps)
        with suppress(StopTraining):
            self._results[rank] = self._train(job)
        job.close()
        self._reports[rank] = {
            **job.report(),
            **record.report(0),
            "losses": record.values(),
            "group_bytes": tracer.sent.total,
        }

    def _check_model(self, step: Any) -> None:
        if step.model in self._models:
            raise BadInput(
                "the script makes its model outside of the training function, so that all virtual "
                "workers share one: make it inside"
            )
        self._models.add(step.model)


def _devices_of_servers(cluster: Cluster, workers: int, servers: int) -> list[int]:
    """On the hosts of the workers in turn, as launchers place them."""
    devices = cluster.node.devices
    hosts = math.ceil(workers / devices)
    return [server % hosts * devices for server in range(servers)]


@contextmanager
def _silent(is_shown: bool) -> Iterator[None]:
    if is_shown:
        yield
        return
    with open("/dev/null", "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield
