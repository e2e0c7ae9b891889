"""The life of a worker process: device, group, job, training, and the end of it.

    Worker.run
      ├─ die_with_launcher
      ├─ _open_group        one rank, or comm.select after the rendezvous of all ranks
      ├─ tracer, progress, seed
      ├─ Job                handed to the training function
      └─ report             what happened, in the run directory; a failure too

Under Shoal's own launcher a worker that fails writes a report and exits at once.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shoal.comm.board import Board, GroupMember, RunDirBoard
from shoal.comm.elastic import ElasticSum
from shoal.comm.elastic_group import ElasticGroup
from shoal.comm.elastic_hosts import ElasticHosts
from shoal.comm.executor import Executor
from shoal.comm.executors.deferred import Deferred
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.meetings import Meetings
from shoal.comm.membership import GroupMembership
from shoal.comm.network import HostNetwork
from shoal.comm.network_board import open_board
from shoal.comm.refusals import leave_with_agent
from shoal.comm.select import DEFAULT_TIMEOUT_S, GroupSpec, open_group, shared_store
from shoal.comm.store_board import StoreBoard
from shoal.comm.tracing import Traced
from shoal.errors import BadInput, PeerLost, RunOver, ShoalError, StrategyError
from shoal.launch.device import asked_device, choose_backend, choose_device
from shoal.launch.environment import Placement, is_one_host
from shoal.launch.failures import report_failure
from shoal.launch.host_ranks import ask_hosts, meet
from shoal.launch.orphan import ending_with_agent, require_agent_store
from shoal.launch.rendezvous import open_rendezvous
from shoal.launch.uncaught import add_line_of_script
from shoal.observe.capture import Capture, StopTraining
from shoal.observe.memory_estimate import estimate_memory
from shoal.observe.memory_probe import Probe
from shoal.observe.progress import for_worker, open_progress
from shoal.observe.trace import OFF, Recorder, Tracer
from shoal.observe.workload_profile import profile_workload
from shoal.observe.workload_trace import trace_workload
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import faults_of
from shoal.runtime.parent_death import die_with_launcher
from shoal.runtime.preemption import EXIT_STATUS, Preemption
from shoal.runtime.run_dir import RunDir
from shoal.runtime.seeding import seed_python
from shoal.runtime.step_count import StepCount
from shoal.runtime.trust import require_protected, require_trusted_network
from shoal.runtime.waits import Watcher, waiting
from shoal.strategy.strategy import Strategy
from shoal.train.job import Job
from shoal.train.run_services import RunServices

_POLL_S = 0.5
_UNTIL_KILLED_S = 5.0  # a launcher kills a stopped worker at the limit: before its peers give up
Train = Callable[[Job], Any]


class Worker:
    """One rank of a run. `number` tells the runs of one process apart."""

    def __init__(
        self, strategy: Strategy, placement: Placement | None, config: RunConfig, number: int
    ):
        self.strategy = strategy
        self.placement = placement
        self.config = replace(config, checkpoint=config.checkpoint.of_call(number))
        self.number = number
        self.seed = config.seed or 0
        self.size = placement.size if placement else 1
        self.rank = placement.rank if placement else 0
        strategy.require_built()
        strategy.layout(self.size)
        self.device = asked_device(config.device)
        self._is_settled = False
        self._membership: GroupMembership | None = None  # of an elastic run
        if not self._asks_hosts:
            self._settle(placement)

    @property
    def _asks_hosts(self) -> bool:
        """Whether the other ranks have to say first which of them are on this host."""
        if self.placement is None or self._is_settled:
            return False
        shares_gpus = self.placement.has_several_agents and self.device.type == "cuda"
        is_known = self.placement.knows_hosts and not shares_gpus
        return not is_known and self.strategy.sync_for(self.size).communicates

    def _settle(self, placement: Placement | None) -> None:
        """Which ranks share this host is known now, as far as it ever is."""
        self._is_settled = True
        self.placement = placement
        self.device = choose_device(self.config.device, placement)
        _check_host(self.strategy, placement, self.device)

    def run(self, train: Train) -> Any:
        """Call `train(job)`, and return what it returns."""
        die_with_launcher(self.config.launcher_pid)
        if self.report_dir is not None:
            self.report_dir.mark_training(self.rank)
        with ExitStack() as stack:
            stack.enter_context(ending_with_agent(self.rank, self.config.environ))
            stack.enter_context(Watcher(self.config.wait))
            preemption = Preemption(self.run_dir, self.rank, self.size)
            stack.enter_context(preemption)
            group = stack.enter_context(self._open_group())
            stack.enter_context(self._agreeing(preemption, group))
            tracer = self._make_tracer(group)
            send = open_progress(self.config.progress_fd)
            progress = for_worker(self.rank, self.size, send, isinstance(group, ElasticGroup))
            stack.callback(progress.close)
            if isinstance(group, ElasticGroup):
                group.wrap = lambda executor: _traced(executor, tracer)
            elif tracer.enabled:
                group = Group(_traced(group.executor, tracer))

            meetings = self._make_meetings()
            step_count = self._make_step_count()
            if step_count is not None:
                stack.callback(step_count.close)

            def make_job(kind: type[Job]) -> Job:
                return kind(
                    self.strategy,
                    group,
                    device=self.device,
                    seed=self.seed,
                    services=RunServices(
                        progress=progress,
                        tracer=tracer,
                        faults=faults_of(self.config, self.rank, self.size),
                        elastic_sum=self._make_elastic_sum(meetings),
                        meetings=meetings,
                        preemption=preemption,
                        step_count=step_count,
                        local_rank=self.placement.local_rank if self.placement else 0,
                        local_size=self.placement.local_size if self.placement else 1,
                        config=self.config,
                    ),
                )

            torch.manual_seed(self.seed)
            seed_python(self.seed)
            try:
                return self._run_job(train, make_job)
            except SystemExit as end:
                if not end.code:
                    self.mark_finished()
                raise
            except RunOver as over:
                self._check_finished(over)
                if self.report_dir is None:
                    print(f"shoal: {over}", file=sys.stderr, flush=True)
                else:  # the launcher knows whether it was there before, and says so
                    self.report_dir.mark_too_late(self.rank, self.config.generation)
                return None
            except Exception as error:
                self.fail(error)
                raise
            finally:
                if isinstance(tracer, Recorder) and self.config.trace_dir is not None:
                    tracer.write(self.config.trace_dir)

    def _check_finished(self, over: RunOver) -> None:
        """PeerLost where the others have not finished, but were lost."""
        run_dir = self.config.run_dir
        have_finished = run_dir is None or bool(run_dir.finished_ranks())
        if self._membership is not None:
            have_finished = self._membership.has_finished
        if not have_finished:
            doing = "coming back: all workers were lost, and with them what they had trained"
            error: ShoalError = PeerLost(self.rank, None, doing)
            if self.strategy.is_elastic:  # no worker that is started again could do better
                error = ShoalError(f"worker {self.rank}, {doing}")
            self.fail(error)
            raise error from over

    def _run_job(self, train: Train, make_job: Callable[[type[Job]], Job]) -> Any:
        is_estimate = estimate_memory(self.config.memory_estimate, train, make_job)
        asked = self.config.workload_trace
        is_profile = not is_estimate and profile_workload(asked, train, make_job)
        if is_estimate or is_profile or trace_workload(asked, train, make_job):
            self.mark_finished()
            return None
        job = make_job(Job)
        self.prepare(job)
        return self._train(train, job)

    def _train(self, train: Train, job: Job) -> Any:
        capture = Capture.start(self.config.capture, job, self.number)
        probe = Probe.start(self.config.memory_probe, job)
        result = None
        end: SystemExit | None = None
        with suppress(StopTraining), self._ending_forks():
            try:
                result = train(job)
            except SystemExit as exit:
                if exit.code or capture is None:
                    raise
                end = exit  # what was trained until then is compared
        if capture is not None:
            capture.write()
        if probe is not None:
            probe.write()
        job.close()
        self.report(job)
        self.mark_finished()
        if job.is_preempted:
            raise SystemExit(EXIT_STATUS)
        if end is not None:
            raise end
        return result

    @contextmanager
    def _ending_forks(self) -> Iterator[None]:
        """A fork that the script made ends here: connections and threads are its parent's."""
        own_pid = os.getpid()
        try:
            yield
        except BaseException as error:
            if os.getpid() != own_pid:
                _end_fork(error)
            raise
        if os.getpid() != own_pid:
            _end_fork(None)

    # ------------------------------------------------------------------ hooks for `shoal compare`

    def prepare(self, job: Job) -> None:
        """Called before training."""

    def report(self, job: Job) -> None:
        """Called after training: writes the report for the launcher."""
        if self.report_dir is not None:
            self.report_dir.write_report(self.rank, job.report())

    def mark_finished(self) -> None:
        """Called at the end of a run that succeeded."""
        if self.report_dir is not None:
            self.report_dir.mark_finished(self.rank)

    def fail(self, error: Exception) -> None:
        """Under Shoal's own launcher: write a report and exit at once.

        Closing the group may wait for a peer that waits for this rank; the launcher ends the
        other workers and reports the first failure.
        """
        if self.report_dir is not None:
            add_line_of_script(error)
            report_failure(self.report_dir, self.rank, error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2 if isinstance(error, BadInput) else 1)

    # ------------------------------------------------------------------ group, tracer, sums

    @property
    def run_dir(self) -> RunDir | None:
        """The run directory, where Shoal's own launcher started this process."""
        is_ours = self.placement is not None and self.placement.launcher == "shoal"
        return self.config.run_dir if is_ours else None

    @property
    def report_dir(self) -> RunDir | None:
        """Where a launcher of Shoal, or its agent on this host, reads what this worker writes."""
        return self.run_dir or self.config.host_dir

    @contextmanager
    def _open_group(self) -> Iterator[Group]:
        run_dir = self.run_dir
        if self.placement is None or not self.strategy.sync_for(self.size).communicates:
            yield solo_group()
        elif self.strategy.is_elastic and (run_dir is not None or self.config.board is not None):
            with closing(self._make_elastic_group(run_dir)) as elastic:
                yield elastic
        elif run_dir is not None and (self.strategy.starts_apart or self._comes_back):
            folder = run_dir.start_folder(self.number)
            with ExitStack() as stack:
                later = self._open_full_group(self.placement)

                def make() -> Executor:
                    if self.config.generation:
                        raise BadInput(
                            f"worker {self.rank} was started again, and the script exchanges "
                            "tensors between all workers, who met without it: run it without "
                            "--restart"
                        )
                    return stack.enter_context(later).executor

                keeps = self._comes_back
                has_exited = run_dir.has_exited
                yield Group(Deferred(folder, self.rank, self.size, has_exited, make, keeps))
        else:
            with self._open_full_group(self.placement) as group:
                if run_dir is not None:
                    run_dir.mark_all_joined()
                yield group

    def _make_elastic_group(self, run_dir: RunDir | None) -> ElasticGroup:
        """A group that is formed when this worker has built its model."""
        me = GroupMember(self.rank, self.config.generation)
        hosts = None
        board: Board
        if run_dir is not None:
            board = RunDirBoard(run_dir, self.number)
        else:
            hosts = ElasticHosts(HostNetwork(self.config), self.config.host_id)
            hosts.check()
            board = open_board(self.config, me, self.number)
        patience_s = self._patience_s + _UNTIL_KILLED_S
        membership = GroupMembership(board, me, self.size, patience_s)
        self._membership = membership
        limit_s = self.config.wait.limit_s or DEFAULT_TIMEOUT_S
        return ElasticGroup(membership, limit_s + _UNTIL_KILLED_S, hosts)

    @contextmanager
    def _agreeing(self, preemption: Preemption, group: Group) -> Iterator[None]:
        """Other launchers have no run directory: ranks agree on where to stop in the store."""
        if self.run_dir is not None or group.size == 1:
            yield
            return
        store = shared_store(f"preemption of run {self.number}", group.rank, group.size)
        with (
            StoreBoard(store, group.rank, group.size, preemption.ask) as board,
            preemption.agreeing(board),
        ):
            yield

    @contextmanager
    def _open_full_group(self, placement: Placement) -> Iterator[Group]:
        """A group of all ranks; all of them have joined when the block begins."""
        require_agent_store(placement, self.config.environ)
        store: Store | None = None
        if self._asks_hosts:
            with waiting(f"rank {self.rank}", "the other workers", "the rendezvous"):
                store = meet(placement, self.config, self.device.type == "cuda")
                placement = ask_hosts(placement, self.config, self.number, store)
            self._settle(placement)
        with open_rendezvous(placement) as init_method, self._fail_when_peers_exit() as joined:
            spec = GroupSpec(
                rank=self.rank,
                size=self.size,
                init_method=init_method,
                backend=choose_backend(self.device, placement),
                name=f"run {self.number}",
                algorithm=self.strategy.sync_for(self.size).collective_algorithm,
                replicas=self.strategy.layout(self.size).replicas,
                host_id=self.config.host_id,
                run_dir=self.config.run_dir,
                secret=self._check_network(placement),
                hostname=self._own_host(),
                is_one_host=is_one_host(placement, self.config),
                timeout_s=self.config.wait.limit_s or DEFAULT_TIMEOUT_S,
                config=self.config,
                store=store,
            )
            with ExitStack() as stack:
                with waiting(f"rank {self.rank}", "the other workers", "the rendezvous"):
                    group = stack.enter_context(open_group(spec))
                joined()
                yield group

    def _check_network(self, placement: Placement) -> bytes | None:
        """The key of the run; BadInput where hosts that are not trusted would reach it.

        The others may have a key, and would wait for this rank.
        """
        try:
            return self._key_of_hosts(placement)
        except BadInput as error:
            if placement.launcher == "torchrun" and placement.rendezvous == "env://":
                leave_with_agent(self.rank, self.size, f"run {self.number}", str(error))
            raise BadInput(f"rank {self.rank}: {error}") from error

    def _key_of_hosts(self, placement: Placement) -> bytes | None:
        if is_one_host(placement, self.config) or dist.is_initialized():
            return self.config.read_secret()
        says = self.rank == 0
        backend = "NCCL" if choose_backend(self.device, placement) == "nccl" else "Gloo"
        secret = require_protected(self.config, "the rendezvous of several hosts", says)
        if backend == "NCCL" or HostNetwork(self.config).between == "gloo":
            require_trusted_network(self.config, f"{backend} between hosts", says)
        return secret

    def _own_host(self) -> str | None:
        """By which other hosts reach this one; under torchrun rank 0 is at MASTER_ADDR."""
        return self.config.hostname or self.config.environ.get("MASTER_ADDR")

    @contextmanager
    def _fail_when_peers_exit(self) -> Iterator[Callable[[], None]]:
        """Until the yielded function is called: fail when a worker exits before it has joined."""
        run_dir = self.run_dir
        has_joined = threading.Event()
        if run_dir is None:
            yield has_joined.set
            return

        def watch() -> None:
            while not has_joined.wait(_POLL_S):
                exited = [rank for rank in range(self.size) if run_dir.has_exited(rank)]
                if exited and not has_joined.wait(_POLL_S):  # or it had joined and finished
                    self.fail(PeerLost(self.rank, exited[0], "the rendezvous of all workers"))

        watcher = threading.Thread(target=watch, name="shoal-rendezvous", daemon=True)
        watcher.start()

        def stop() -> None:
            has_joined.set()
            watcher.join()

        try:
            yield stop
        finally:
            stop()

    def _make_tracer(self, group: Group) -> Tracer:
        if self.config.trace_dir is None:
            return OFF
        origin = torch.tensor([time.monotonic_ns()], device=self.device)
        if self.placement and self.placement.local_size == self.size:
            group.broadcast(origin).wait()
        else:  # hosts have different clocks: the end of the barrier is zero on each
            group.barrier().wait()
            origin.fill_(time.monotonic_ns())
        return Recorder(self.rank, int(origin))

    def _make_elastic_sum(self, meetings: Meetings | None) -> ElasticSum | None:
        """None where no launcher notes exits; other launchers end the run with a lost worker."""
        run_dir = self.run_dir
        if run_dir is None or not self.strategy.survives_loss or self.strategy.is_elastic:
            return None
        folder = run_dir.tally_folder(self.number)
        has_exited = run_dir.has_exited if meetings is None else meetings.is_missing
        return ElasticSum(folder, self.rank, has_exited, self._patience_s)

    def _make_step_count(self) -> StepCount | None:
        """None where no launcher of Shoal reads it."""
        return None if self.report_dir is None else StepCount(self.report_dir.steps(self.rank))

    def _make_meetings(self) -> Meetings | None:
        """None where lost workers do not come back."""
        run_dir = self.run_dir
        if run_dir is None or not self._comes_back:
            return None
        file = run_dir.meetings(self.number)
        generation = self.config.generation
        return Meetings(file, self.rank, self.size, generation, run_dir.has_ended, self._patience_s)

    @property
    def _comes_back(self) -> bool:
        """Whether the launcher starts lost workers again."""
        is_elastic = self.strategy.is_elastic  # there `GroupMembership` does all of it
        return self.config.takes_back and self.strategy.takes_back and not is_elastic

    @property
    def _patience_s(self) -> float:
        return self.config.wait.limit_s or math.inf


def _traced(executor: Executor, tracer: Tracer) -> Executor:
    return Traced(executor, tracer) if tracer.enabled else executor


def _check_host(strategy: Strategy, placement: Placement | None, device: torch.device) -> None:
    """Refuse, before anything starts, a device or placement that the strategy cannot use."""
    if placement is None or placement.size == 1:
        return
    term = strategy.sync_for(placement.size)
    is_cpu = device.type == "cpu"
    if term.collective_algorithm is not None and not is_cpu:
        raise BadInput(f"{term} runs on CPUs: on GPUs leave the algorithm to NCCL")
    strategy.check_hosts(placement.size, placement.local_size < placement.size)
    if term.needs_one_host and not is_cpu:
        raise StrategyError(
            f"{term.name} keeps the weights in memory that processes share, and {device} is not "
            "the CPU: run it with --device cpu"
        )


def _end_fork(error: BaseException | None) -> NoReturn:
    """As the interpreter would end it, without what the parent has to close."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        is_number = error.code is None or isinstance(error.code, int)
        status = int(error.code or 0) if is_number else 1
        if not is_number:
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
