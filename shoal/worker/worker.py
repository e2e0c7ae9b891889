"""The life of a worker process: device, group, job, training, and the end of it.

    Worker.run
      ├─ die_with_launcher
      ├─ WorkerGroup.open   one rank, or comm.select after the rendezvous of all ranks
      ├─ tracer, progress, seed
      ├─ Job                handed to the training function
      └─ report             what happened, in the run directory; a failure too

Under Shoal's own launcher a worker that fails writes a report and exits at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.group import Group
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.select import shared_store
from shoal.errors import BadInput, RunOver, StopTraining
from shoal.launch.losses.failures import add_line_of_script, report_failure, why_too_late
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import faults_of
from shoal.runtime.files import StepCount
from shoal.runtime.launched_worker import seed_python
from shoal.runtime.memory_limit import keep_freed_memory
from shoal.runtime.parent_death import die_with_launcher, forks_end_here
from shoal.runtime.preemption import EXIT_STATUS, Preemption
from shoal.runtime.trace import OFF, Recorder, Tracer
from shoal.runtime.waits import Watcher
from shoal.runtime.wording import say
from shoal.strategy.strategy import Strategy
from shoal.train.callbacks import Callback, JsonLines, TensorBoard
from shoal.train.job import Job
from shoal.train.progress import for_worker, open_progress
from shoal.train.step.run_services import RunServices
from shoal.train.throughput import StepRecord
from shoal.worker.environment import Placement
from shoal.worker.returned import hand_back
from shoal.worker.worker_group import WorkerGroup

if TYPE_CHECKING:
    from shoal.comm.members.elastic_sum import ElasticSum
    from shoal.comm.members.meetings import Meetings
    from shoal.observe.capture import Capture
    from shoal.observe.memory_probe import Probe
    from shoal.train.agreement import CallLog


Train = Callable[[Job], Any]


class Worker:
    """One rank of a run. `number` tells the runs of one process apart."""

    callbacks: Sequence[Callback] = ()
    _record: StepRecord | None = None  # where there is a trace

    def __init__(
        self, strategy: Strategy, placement: Placement | None, config: RunConfig, number: int
    ):
        self.strategy = strategy
        self.config = replace(config, checkpoint=config.checkpoint.of_call(number))
        self.number = number
        self.seed = config.seed or 0
        strategy.require_built()
        strategy.layout(placement.size if placement else 1)
        self._group = WorkerGroup(strategy, placement, self.config, number, self.fail)
        self.rank = self._group.rank
        self.size = self._group.size
        self.run_dir = self._group.run_dir
        # where a launcher of Shoal, or its agent on this host, reads what this worker writes
        self.report_dir = self.run_dir or config.host_dir

    def run(self, train: Train) -> Any:
        """Call `train(job)`, and return what it returns."""
        die_with_launcher(self.config.launcher_pid, self.config.environ)
        keep_freed_memory()
        if self.report_dir is not None:
            self.report_dir.mark(self.report_dir.training(self.rank))
        with ExitStack() as stack:
            stack.enter_context(Watcher(self.config.wait))
            preemption = Preemption(self.run_dir, self.rank, self.size)
            stack.enter_context(preemption)
            group = stack.enter_context(self._group.open())
            stack.enter_context(self._agreeing(preemption, group))
            tracer = self._tracer = self._make_tracer(group)
            send = open_progress(self.config.progress_fd)
            progress = for_worker(self.rank, self.size, send, isinstance(group, ElasticGroup))
            stack.callback(progress.close)
            watched = self._watched(send, stack)
            if tracer.enabled:
                from shoal.comm.tracing import Traced

                if isinstance(group, ElasticGroup):
                    group.wrap = lambda executor: Traced(executor, tracer)
                else:
                    group = Group(Traced(group.executor, tracer))

            meetings, elastic_sum = self._make_meetings()
            calls = self._log_calls(stack) if meetings is None else None
            step_count = None
            if self.report_dir is not None:
                step_count = StepCount(self.report_dir.steps(self.rank))
                stack.callback(step_count.close)
            place = self._group.placement

            def make_job(kind: type[Job]) -> Job:
                job = kind(
                    self.strategy,
                    group,
                    device=self._group.device,
                    seed=self.seed,
                    services=RunServices(
                        progress=progress,
                        tracer=tracer,
                        faults=faults_of(self.config, self.rank, self.size),
                        elastic_sum=elastic_sum,
                        meetings=meetings,
                        calls=calls,
                        preemption=preemption,
                        step_count=step_count,
                        callbacks=self._all_callbacks(),
                        local_rank=place.local_rank if place else 0,
                        local_size=place.local_size if place else 1,
                        config=self.config,
                    ),
                )
                return watched(job)

            torch.manual_seed(self.seed)
            seed_python(self.seed)
            if isinstance(tracer, Recorder) and self.config.trace_dir is not None:
                stack.callback(tracer.write, self.config.trace_dir)
            return self._run_to_its_end(train, make_job)

    def _log_calls(self, stack: ExitStack) -> CallLog | None:
        """Where workers may wait for each other in different calls, and none comes back."""
        is_apart = self.strategy.survives_loss or self.strategy.sync_for(self.size).has_servers
        if self.run_dir is None or self.size == 1 or not is_apart:
            return None
        from shoal.train.agreement import CallLog  # only where it is used

        calls = CallLog(self.run_dir, self.number, self.rank, self.size)
        stack.callback(calls.close)
        return calls

    def _watched(
        self, send: Callable[[Mapping[str, Any]], None] | None, stack: ExitStack
    ) -> Callable[[Job], Job]:
        """What `make_job` passes a job through: where the launcher shows a table, it is watched."""
        if send is None or self.size == 1:
            return lambda job: job
        from shoal.train.throughput import LiveSender  # only where it is needed

        return stack.enter_context(LiveSender(self.rank, send)).watch

    def _run_to_its_end(self, train: Train, make_job: Callable[[type[Job]], Job]) -> Any:
        """The launcher learns how it ended."""
        try:
            return self._run_job(train, make_job)
        except SystemExit as end:
            if not end.code:
                self.mark_finished()
            raise
        except RunOver as over:
            self._check_finished(over)
            if self.report_dir is None:
                say(str(over))
            else:  # the launcher knows whether it was there before, and says so
                late = self.report_dir.late(self.rank, self.config.incarnation)
                self.report_dir.mark(late)
            return None
        except Exception as error:
            self.fail(error)
            raise

    def _check_finished(self, over: RunOver) -> None:
        """Raises where the others have not finished, but were lost."""
        run_dir = self.config.run_dir
        have_finished = run_dir is None or bool(run_dir.finished_ranks())
        if self._group.membership is not None:
            have_finished = self._group.membership.has_finished
        error = why_too_late(self.rank, have_finished, self.strategy.is_elastic)
        if error is not None:
            self.fail(error)
            raise error from over

    def _run_job(self, train: Train, make_job: Callable[[type[Job]], Job]) -> Any:
        """A run that estimates, profiles or traces a step is then done."""
        if (estimate := self.config.memory_estimate).folder is not None:
            from shoal.observe.memory_estimate import estimate_memory

            estimate_memory(estimate, train, make_job)
        if (trace := self.config.workload_trace).folder is not None:
            from shoal.observe.workload_trace import study_workload

            study_workload(trace, train, make_job)
        if estimate.folder is None and trace.folder is None:
            job = make_job(Job)
            self.prepare(job)
            return self._train(train, job)
        self.mark_finished()
        return None

    def _train(self, train: Train, job: Job) -> Any:
        observers: list[Capture | Probe] = []  # for `shoal verify` and `shoal memory`
        if self.config.capture.folder is not None:
            from shoal.observe.capture import Capture

            observers.append(Capture.start(self.config.capture, job, self.number))
        if self.config.memory_probe.folder is not None:
            from shoal.observe.memory_probe import Probe

            observers.append(Probe(job, self.config.memory_probe))
        result = None
        end: SystemExit | None = None
        with job.checkpoints.finishing(), suppress(StopTraining):
            try:
                with forks_end_here():
                    result = train(job)
            except SystemExit as exit:
                if exit.code or self.config.capture.folder is None:
                    raise
                end = exit  # what was trained until then is compared
        for observer in observers:
            observer.write()
        job.close()
        if self.config.returned is not None and job.is_first:
            hand_back(self.config.returned, result)
        self.report(job)
        self.mark_finished()
        if job.checkpoints.is_preempted:
            raise SystemExit(EXIT_STATUS)
        if end is not None:
            raise end
        return result

    # ------------------------------------------------------------------ hooks for `shoal compare`

    def prepare(self, job: Job) -> None:
        """Called before training."""
        self._record = StepRecord(job) if self._tracer.enabled else None

    def report(self, job: Job) -> None:
        """Called after training: writes the report for the launcher."""
        if self.report_dir is not None:
            report = job.report()
            if self._record is not None:
                report |= self._record.report(self._tracer.origin_ns)
            self.report_dir.write(self.report_dir.report(self.rank), report)

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

    def _all_callbacks(self) -> list[Callback]:
        """Those of the script and of the command; none in a run that only studies a step."""
        config = self.config
        studies = (config.capture, config.memory_estimate, config.memory_probe)
        if any(each.folder is not None for each in (*studies, config.workload_trace)):
            return []
        found = list(self.callbacks)
        if config.jsonl is not None:
            found.append(JsonLines(config.jsonl))
        if config.tensorboard is not None and self.rank == 0:
            found.append(TensorBoard(config.tensorboard))
        return found

    @contextmanager
    def _agreeing(self, preemption: Preemption, group: Group) -> Iterator[None]:
        """Other launchers have no run directory: ranks agree on where to stop in the store."""
        if self.run_dir is not None or group.size == 1:
            yield
            return
        store = shared_store(f"preemption of run {self.number}", group.rank, group.size)

        from shoal.comm.members.store_board import StoreBoard

        board = StoreBoard(store, group.rank, group.size, preemption.ask)
        with board, preemption.agreeing(board):
            yield

    def _make_tracer(self, group: Group) -> Tracer:
        if self.config.trace_dir is None:
            return OFF
        from shoal.comm.executors.hierarchical.topology import host_id
        from shoal.comm.tracing import common_origin_ns

        place = self._group.placement
        is_one_host = place is None or place.local_size == self.size
        origin_ns = common_origin_ns(group, is_one_host)
        return Recorder(self.rank, origin_ns, host_id(self.config.host_id).decode())

    def _make_meetings(self) -> tuple[Meetings | None, ElasticSum | None]:
        """Meetings: where lost workers come back; a sum: where a launcher notes their exits.

        Other launchers end the run with a lost worker.
        """
        run_dir = self.run_dir
        if run_dir is None or not self.strategy.survives_loss or self.strategy.is_elastic:
            return None, None
        from shoal.comm.members.board import GroupMember
        from shoal.comm.members.meetings import open_meetings

        me = GroupMember(self.rank, self.config.incarnation)
        comes_back = self._group.comes_back
        file = run_dir.meetings(self.number)
        patience_s = self._group.patience_s
        return open_meetings(file, run_dir, me, self.size, comes_back, patience_s)
