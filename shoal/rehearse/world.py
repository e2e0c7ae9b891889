"""A rehearsal: virtual workers and servers of one strategy, from their start to their end."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.cluster import Cluster
from shoal.comm.group import Group
from shoal.comm.tracing import Traced
from shoal.errors import BadInput, StopTraining
from shoal.plan.simulator.step_tasks import Unevenness
from shoal.protocol.endpoint import replaced_sockets
from shoal.rehearse.executor import Exchange, Virtual
from shoal.rehearse.network import VirtualNetwork
from shoal.rehearse.pace import Pace, PacedRecorder, PacedTracer, ServerPace, StepTimes
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.sockets import Place, VirtualSockets
from shoal.rehearse.threading_like import VirtualClock
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.launched_worker import seed_python
from shoal.runtime.trace import Recorder, Trace
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
    times: StepTimes
    uneven: Unevenness
    seed: int = 0
    steps: int | None = None
    records: bool = False  # the spans of every process
    is_shown: bool = False  # what the script and its first worker print


@dataclass
class WorkerOutcome:
    """What one worker did; times are virtual seconds since the start of the rehearsal."""

    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # of the job, at each loss
    ends_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    result: Any = None


@dataclass
class RehearsalOutcome:
    strategy: str
    seconds: float
    workers: list[WorkerOutcome]
    link_bytes: dict[str, float]
    spans: Trace = field(default_factory=dict)


def rehearse(train: Train, spec: RehearsalSpec) -> RehearsalOutcome:
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
        self.exchange = Exchange(self.network, self.time, range(spec.workers), algorithm)
        self.outcomes = [WorkerOutcome() for _ in range(spec.workers)]
        self.recorders: list[Recorder] = []
        self._models: set[nn.Module] = set()
        self._secret = secrets.token_bytes(32)

    def _refuse(self, term: Any) -> None:
        """What a rehearsal cannot do yet."""
        if self.spec.strategy.is_elastic or getattr(term, "replicas", 1) > 1:
            raise BadInput(
                f"{self.spec.strategy} survives lost workers or servers, and a rehearsal does not "
                "lose any yet: leave out elastic and replicas"
            )

    def run(self) -> RehearsalOutcome:
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
        spans: Trace = {recorder.process: recorder.spans for recorder in self.recorders}
        seconds = max((each.ends_s[-1] for each in self.outcomes if each.ends_s), default=0.0)
        return RehearsalOutcome(
            str(self.spec.strategy), seconds, self.outcomes, self.network.link_bytes, spans
        )

    # ------------------------------------------------------------------ processes

    def _body(self) -> None:
        servers: list[Server] = []
        for index, device in enumerate(self.server_devices):
            starter = self.time.spawn(
                f"server {index}",
                lambda index=index: servers.append(self._serve(index)),
                None,
                group=Place(f"server {index}", device),
            )
            self.time.join(starter)
        self._addresses = tuple(server.address for server in servers)
        fibers = [
            self.time.spawn(
                f"rank {rank}",
                lambda rank=rank: self._work(rank),
                RandomState(),
                group=Place(f"rank {rank}", rank),
            )
            for rank in range(self.spec.workers)
        ]
        for fiber in fibers:
            self.time.join(fiber)
        for server in servers:
            server.close()

    def _serve(self, index: int) -> Server:
        server = Server(f"virtual:server-{index}", self._secret)
        server.host.slowness = ServerPace(self.time, self.spec.times.apply_s)
        if self.spec.records:
            recorder = Recorder(f"server {index}", 0, "rehearsal")
            server.host.tracer = recorder
            self.recorders.append(recorder)
        return server

    def _work(self, rank: int) -> None:
        spec = self.spec
        outcome = self.outcomes[rank]
        pace = Pace(self.time, spec.times, rank, spec.uneven)
        executor: Any = Virtual(self.exchange, range(spec.workers), rank)
        tracer: PacedTracer | PacedRecorder = PacedTracer(pace)
        if spec.records:
            tracer = PacedRecorder(pace, rank, "rehearsal")
            self.recorders.append(tracer)
            executor = Traced(executor, tracer)
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
            progress=_Silence(),
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
            outcome.result = self._train(job)
        job.close()
        outcome.report = job.report()
        outcome.losses = record.values()
        outcome.steps = [step for step, _ in record.ends]
        outcome.ends_s = [ns / 1e9 for _, ns in record.ends]
        outcome.busy_s = pace.busy_s

    def _check_model(self, step: Any) -> None:
        if step.model in self._models:
            raise BadInput(
                "the script makes its model outside of the training function, so that all virtual "
                "workers share one: make it inside"
            )
        self._models.add(step.model)


class _Silence:
    """The progress of a worker that nobody looks at."""

    def due(self, step: int, total: int | None) -> bool:
        return False

    def show(self, record: Any) -> None:
        return None

    def close(self) -> None:
        return None


def _devices_of_servers(cluster: Cluster, workers: int, servers: int) -> list[int]:
    """Beside the workers of one node; on several nodes, on nodes of their own behind them."""
    devices = cluster.node.devices
    if workers <= devices:
        return [server % workers for server in range(servers)]
    nodes = math.ceil(workers / devices)
    return [(nodes + server) * devices for server in range(servers)]


@contextmanager
def _silent(is_shown: bool) -> Iterator[None]:
    if is_shown:
        yield
        return
    with open("/dev/null", "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def waiting_share(outcome: WorkerOutcome) -> float:
    """Of a worker's time, what it does not compute."""
    whole_s = outcome.ends_s[-1] if outcome.ends_s else 0.0
    return 1 - outcome.busy_s / whole_s if whole_s else 0.0
