"""A rehearsal: virtual workers and servers of one strategy, from their start to their end."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.cluster import Cluster
from shoal.comm.executors.deferred import Deferred
from shoal.comm.group import Group
from shoal.comm.members.board import FileBoard, GroupMember
from shoal.comm.members.meetings import open_meetings
from shoal.comm.members.membership import GroupMembership
from shoal.comm.tracing import Traced
from shoal.errors import BadInput, RunOver, StopTraining
from shoal.launch.here.coordinator import coordinated
from shoal.launch.here.process_config import replication_of
from shoal.launch.here.processes import ProcessExit, Role
from shoal.launch.here.supervisor import SignalEvents, Supervisor
from shoal.launch.losses.failures import add_line_of_script, report_failure, why_too_late
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.launch.losses.lost_workers import LossPolicy, RunResult, tolerance_of
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse.executor import Virtual, VirtualElasticGroup, VirtualRanks
from shoal.rehearse.losses import Loss, Losses
from shoal.rehearse.network import VirtualNetwork
from shoal.rehearse.no_arithmetic import NoArithmetic
from shoal.rehearse.pace import Pace, PacedRecorder, ServerPace, WorkerTimes
from shoal.rehearse.processes import VirtualProcesses, VirtualRole
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.shared_replicas import SharedReplicas
from shoal.rehearse.sockets import VirtualProcess, VirtualSockets
from shoal.rehearse.threading_like import VirtualClock
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime import clock
from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.faults import Faults, check_faults, faults_of
from shoal.runtime.files import StepCount, scratch_folder
from shoal.runtime.launched_worker import seed_python
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import Recorder, Trace, server_name
from shoal.server.coordinator.service import CoordinatorService, Core
from shoal.server.main import chain_settings
from shoal.server.process.server import Server
from shoal.server.protocol.endpoint import replaced_sockets
from shoal.strategy.strategy import Strategy
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.throughput import StepRecord

_COORDINATOR = "virtual:coordinator"
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
    losses: Losses = field(default_factory=Losses)
    progress: Callable[[Job], None] | None = None  # called after the steps of worker 0
    trains: bool = True  # False: nothing large is computed; times and messages are the same


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal came to; times are virtual, from its start."""

    seconds: float
    reports: list[dict[str, Any]]  # of each worker that has finished, as those of a run
    results: list[Any]  # what each training function has returned; None: it was lost
    link_bytes: dict[str, float]
    spans: Trace
    said: list[str]  # by the launcher: who was lost, and what became of it
    result: RunResult  # as of a run


def rehearse(train: Train, spec: RehearsalSpec) -> Rehearsed:
    """Run `train(job)` on virtual workers; the same call gives the same bits and times."""
    return _Rehearsal(train, spec).run()


class _Rehearsal:
    def __init__(self, train: Train, spec: RehearsalSpec):
        self._train = train
        self.spec = spec
        term: Any = spec.strategy.sync_for(spec.workers)
        spec.strategy.require_built()
        spec.strategy.layout(spec.workers)
        servers = spec.strategy.servers(spec.workers)
        losses = spec.losses
        self._secret = secrets.token_bytes(32)
        config = RunConfig(kill=losses.at_steps, restarts=losses.restarts, secret=self._secret)
        are_several = spec.workers > spec.cluster.node.devices
        ends = term.shares_memory and are_several  # a loss ends the run
        if losses and term.shares_memory and not ends:  # those who come back share memory, too
            config = replace(config, start=spec.workers)
        self._replication = replication_of(spec.strategy, spec.workers, losses.restarts)
        self._config = replace(
            config, coordinator=_COORDINATOR if self._replication.is_on else None
        )
        check_faults(self._config, spec.workers, servers)
        tolerance = tolerance_of(spec.strategy, spec.workers, losses.restarts)
        may_lose = bool(losses) and not ends  # what fails unplanned ends the rehearsal, too
        self._tolerance = tolerance if may_lose else None
        self._may_lose = self._tolerance is not None
        comes_back = self._config.takes_back and spec.strategy.takes_back
        self._comes_back = comes_back and not spec.strategy.is_elastic
        self.server_devices = _devices_of_servers(spec.cluster, spec.workers, servers)
        devices = 1 + max([spec.workers - 1, *self.server_devices])
        cluster = spec.cluster.of_size(devices)
        losses.check(workers=spec.workers, servers=servers, hosts=cluster.nodes)
        spec.strategy.check_hosts(spec.workers, are_several)
        self.time = VirtualTime(nullcontext if spec.trains else partial(NoArithmetic, {}))
        self.network = VirtualNetwork(cluster, self.time)
        algorithm = term.collective_algorithm or "auto"
        self.exchange = VirtualRanks(self.network, self.time, range(spec.workers), algorithm)
        self._servers: list[Server] = []
        self._shared = SharedReplicas(self.exchange, self._servers)
        self._reports: dict[int, dict[str, Any]] = {}
        self._results: dict[int, Any] = {}
        self._recorders: list[Recorder] = []
        self._models: set[nn.Module] = set()
        self._said: list[str] = []

    def run(self) -> Rehearsed:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums have the same order on every machine
        try:
            sockets = VirtualSockets(self.network, self.time)
            self.processes = VirtualProcesses(self.time, sockets)
            with (
                ExitStack() as self._stack,
                scratch_folder("rehearse") as folder,
                clock.replaced(VirtualClock(self.time)),
                replaced_sockets(sockets),
                _silent(),
            ):
                self._run_dir = RunDir(folder)
                self._run_dir.write_secret(self._secret)
                self.time.run(self._body)
        finally:
            torch.set_num_threads(threads)
            self._shared.close()
        spans: Trace = {}
        for recorder in self._recorders:
            spans.setdefault(recorder.process, []).extend(recorder.spans)
        ranks = range(self.spec.workers)
        found = tuple(self._reports.get(rank) for rank in ranks)
        return Rehearsed(
            max((ns for report in self._reports.values() for ns in report["loss_s"]), default=0.0),
            [self._reports[rank] for rank in ranks if rank in self._reports],
            [self._results.get(rank) for rank in ranks],
            self.network.link_bytes,
            spans,
            self._said,
            replace(self._result, reports=found),
        )

    # ------------------------------------------------------------------ processes

    def _body(self) -> None:
        """What a launcher does: start all, and decide what follows from each exit."""
        run_dir = self._run_dir
        say = self._said.append
        workers = self.spec.workers
        servers = len(self.server_devices)
        self._events: Any = clock.Queue()
        self.time.current.group = VirtualProcess("launcher", 0)
        self._addresses = tuple(f"virtual:server-{index}" for index in range(servers))
        policy = LossPolicy(run_dir, workers, self._tolerance, say, is_planned=lambda exit: True)
        policy.restart_s = self.spec.losses.restart_s
        self._server_policy = ServerPolicy(servers, self._replication, say, are_here=False)
        write = lambda text, _: say(text.removeprefix("shoal: ").rstrip("\n"))  # noqa: E731
        time = self.time
        restart_s = policy.restart_s
        later = lambda act, rank: time.at(time.now_s + restart_s, partial(act, rank))  # noqa: E731
        roles = (
            VirtualRole("worker", workers, self.processes, partial(later, self._start_worker)),
            VirtualRole("server", servers, self.processes, partial(later, self._start_server)),
        )
        with coordinated(self._replication, self._config, run_dir, say) as coordinator:
            if self._replication.is_on:
                CoordinatorService(Core(), self._secret, [_COORDINATOR])
                roles[1].note_exit = lambda index: coordinator.server_exited(index, os.getpid())
            self._listening = [clock.Event() for _ in range(servers)]
            for index in range(servers):
                self._start_server(index)
            for listens in self._listening:
                listens.wait()
            run_dir.mark(run_dir.all_joined)
            for rank in range(workers):
                self._start_worker(rank)
            self._server_policy.look = coordinator.watch(self._server_policy.see)
            self.spec.losses.begin(time, self._lose, self.network.cluster.nodes, self.spec.seed)
            supervisor = Supervisor(
                run_dir, policy, self._server_policy, say, workers, servers, events=self._events
            )
            supervisor.run(*roles)
        self._result = supervisor.result(workers, SignalEvents(self._events.put), write)

    def _start_server(self, index: int) -> None:
        self._server_policy.started(index, os.getpid())
        exited = partial(self._note_exit, "server", index)
        body = partial(self._serve, index)
        self.processes.start(f"server {index}", self.server_devices[index], body, exited)

    def _start_worker(self, rank: int) -> None:
        def exited(status: int) -> None:
            self.exchange.lose(rank, is_lost=status != 0)
            self._note_exit("worker", rank, status)

        body = partial(self._run_worker, rank, self._run_dir.incarnation(rank))
        self.processes.start(f"worker {rank}", rank, body, exited, RandomState())

    def _note_exit(self, role: Role, rank: int, status: int) -> None:
        self._events.put(ProcessExit(rank, status, clock.monotonic_ns(), role))

    def _lose(self, loss: Loss) -> None:
        lost = f"{loss.role} {loss.number}"
        devices = self.spec.cluster.node.devices
        for one in list(self.processes.running.values()):
            if lost in (one.name, f"host {one.device // devices}"):
                self.processes.kill(one.name)

    def _kill(self, name: str) -> None:
        self.processes.kill(name)
        clock.check()

    def _serve(self, index: int) -> int:
        """Until it is ended."""
        copied = self._replication
        address = self._addresses[index]
        run_dir = self._run_dir
        place = ServerConfig(index, address, None, None, copied.replicas, copied.consistency)
        chain = chain_settings(replace(self._config, server=place))
        has_exited = run_dir.has_exited if self._may_lose else None
        server = Server(address, self._secret, has_exited, chain=chain)
        self._servers.append(server)
        server.host.takes_back = self._config.takes_back
        server.host.slowness = ServerPace(
            self.time, self.spec.times.apply_s, self.spec.slow_servers.get(index, 1.0)
        )
        number = (index,) if chain is None else (place.shard, place.replica)
        server.host.tracer = Recorder(server_name(*number), 0)
        self._recorders.append(server.host.tracer)
        self._listening[index].set()
        clock.Event().wait()
        return 0

    def _run_worker(self, rank: int, incarnation: int) -> int:
        """Its exit status; it writes why it has failed, for the launcher."""
        error: Exception | None
        try:
            self._work(rank, incarnation)
            return 0
        except RunOver:
            have_finished = bool(self._run_dir.finished_ranks())
            error = why_too_late(rank, have_finished, self.spec.strategy.is_elastic)
            if error is None:
                self._run_dir.mark(self._run_dir.late(rank, incarnation))
                return 0
        except Exception as raised:
            clock.check()
            error = raised
        add_line_of_script(error)
        report_failure(self._run_dir, rank, error)
        return 2 if isinstance(error, BadInput) else 1

    def _group_of(self, me: GroupMember, tracer: Recorder) -> Group:
        """As `worker/worker_group.py` opens it."""
        spec = self.spec
        run_dir = self._run_dir
        rank = me.worker
        if spec.strategy.is_elastic:
            membership = GroupMembership(FileBoard(run_dir.members(0), run_dir), me, spec.workers)
            elastic = VirtualElasticGroup(membership, self.exchange)
            elastic.wrap = lambda executor: Traced(executor, tracer)
            return elastic
        whole = partial(Virtual, self.exchange, range(spec.workers), rank)
        if not self._may_lose or not (spec.strategy.starts_apart or self._comes_back):
            return Group(Traced(whole(), tracer))
        deferred = Deferred(
            run_dir.start_folder(0), rank, spec.workers, run_dir.has_exited, whole, self._comes_back
        )
        return Group(Traced(deferred, tracer))

    def _faults_of(self, config: RunConfig, rank: int) -> Faults | None:
        """Those that the user asked for, which end virtual processes."""
        faults = faults_of(config, rank, self.spec.workers)
        if faults is None:
            return None
        return replace(
            faults,
            end_worker=partial(self._kill, f"worker {rank}"),
            end_server=lambda _, server: self._kill(f"server {server}"),
        )

    def _work(self, rank: int, incarnation: int) -> None:
        spec, run_dir = self.spec, self._run_dir
        pace = Pace(self.time, spec.times, rank, spec.uneven)
        tracer = PacedRecorder(pace, rank)
        self._recorders.append(tracer)
        me = GroupMember(rank, incarnation)
        devices = spec.cluster.node.devices
        config = replace(
            self._config,
            servers=self._addresses or None,
            host_id=f"node-{rank // devices}",
            strategy=str(spec.strategy),
            seed=spec.seed,
            incarnation=incarnation,
            run_dir=run_dir if self._may_lose else None,
        )
        faults = self._faults_of(replace(config, run_dir=run_dir), rank)
        meetings = elastic_sum = None
        if self._may_lose and not spec.strategy.is_elastic:
            meetings, elastic_sum = open_meetings(
                run_dir.meetings(0), run_dir, me, spec.workers, self._comes_back, math.inf
            )
        step_count = StepCount(run_dir.steps(rank)) if self._may_lose else None
        self._stack.callback(step_count.close if step_count else int)
        local_size = min(devices, spec.workers - rank // devices * devices)
        services = RunServices(
            tracer=tracer,
            faults=faults,
            elastic_sum=elastic_sum,
            meetings=meetings,
            step_count=step_count,
            local_rank=rank % devices,
            local_size=local_size,
            config=config,
        )
        torch.manual_seed(spec.seed)
        seed_python(spec.seed)
        job = Job(
            spec.strategy,
            self._group_of(me, tracer),
            device=torch.device("cpu"),
            seed=spec.seed,
            services=services,
        )
        job.checkpoints.dry = True
        job.on_build.append(self._check_model)
        job.on_build.append(pace.watch)
        if not spec.trains:
            job.on_build.append(_trust)
        if not spec.losses:
            job.on_build.append(partial(self._shared.join, rank))
        if rank == 0 and (progress := spec.progress) is not None:
            job.on_step.append(lambda step, loss: progress(job))
        record = StepRecord(job)
        if spec.steps is not None:
            job.stop_after(spec.steps)
        with suppress(StopTraining):
            self._results[rank] = self._train(job)
        job.close()
        report = self._reports[rank] = {
            **job.report(),
            **record.report(0),
            "losses": record.values(),
            "group_bytes": tracer.sent.total,
        }
        if spec.losses:  # the launcher says how many steps a lost worker has missed
            run_dir.write(run_dir.report(rank), report)
        run_dir.mark_finished(rank)

    def _check_model(self, step: Any) -> None:
        if step.model in self._models:
            raise BadInput(
                "the script makes its model outside of the training function, so that all virtual "
                "workers share one: make it inside"
            )
        self._models.add(step.model)


def _trust(step: Any) -> None:
    """What is not computed cannot be compared."""
    step.shard.is_trusted = True


def _devices_of_servers(cluster: Cluster, workers: int, servers: int) -> list[int]:
    """On the hosts of the workers in turn, as launchers place them."""
    devices = cluster.node.devices
    hosts = math.ceil(workers / devices)
    return [server % hosts * devices for server in range(servers)]


@contextmanager
def _silent() -> Iterator[None]:
    with open("/dev/null", "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield
