"""Run a command as many workers on hosts that an engine lends, and supervise them.

run_remote ── RemoteServers ── an agent for each server                  (remote_servers.py)
           ── RemoteWorkers ── an agent on each host ── its workers      (launch/agent.py)
           ── Supervisor: the same decisions as on one host              (launch/supervisor.py)
           ── a board, where the strategy is elastic                     (ElasticWorkers)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shoal.comm.board import GroupMember
from shoal.comm.guarded_store.service import StoreService
from shoal.comm.network_board import ServedBoard
from shoal.errors import BadInput, ServerFailed, ShoalError, WorkersFailed
from shoal.launch.agent_processes import OutputSink, RemoteRun
from shoal.launch.failures import first_failure, launch_error
from shoal.launch.joining import JoinRequest, join_requests
from shoal.launch.local import LaunchSpec, enter
from shoal.launch.log_files import LogFiles
from shoal.launch.lost_workers import LossPolicy
from shoal.launch.machines import Machines, ServerHosts, place_evenly
from shoal.launch.output import LineForwarder, OnProgress, Write, print_lines
from shoal.launch.processes import ProcessExit, Role
from shoal.launch.remote_servers import RemoteServers
from shoal.launch.remote_workers import RemoteWorkers
from shoal.launch.report import RunResult, say_losses
from shoal.launch.supervisor import Event, SignalEvents, Supervisor
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import new_run_dir
from shoal.runtime.secret import new_secret


@contextmanager
def serving_elastic(
    run: RemoteRun, workers: RemoteWorkers, policy: LossPolicy, supervisor: Supervisor
) -> Iterator[None]:
    """While the block runs, workers find the board; `supervisor` starts lost ones again."""
    if run.spec.tolerance is None:
        yield
        return
    listener = run.machines.listen()
    host, port = listener.getsockname()[:2]
    workers.board = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    service = StoreService(host, port, run.secret, listener, workers.lose_agent)
    try:
        changes = ElasticWorkers(run, workers, policy, ServedBoard(service))
        changes.note_absent()
        supervisor.restart, supervisor.join = changes.restart, changes.join
        supervisor.survives = changes.survives
        with join_requests(run.run_dir, run.put):
            yield
    finally:
        service.close()


@dataclass(frozen=True)
class ElasticWorkers:
    """What happens when a worker has exited, or is asked for."""

    run: RemoteRun
    workers: RemoteWorkers
    policy: LossPolicy
    board: ServedBoard

    def note_absent(self) -> None:
        """Workers that are not started at first are not waited for."""
        for rank in range(self.run.spec.started, self.run.spec.workers):
            self.policy.note_absent(rank)
            self.board.note_exit(self._latest(rank))

    def survives(self, exit: ProcessExit) -> bool:
        has_survived = self.policy.survives(exit)
        self.board.note_exit(self._latest(exit.rank))
        return has_survived

    def restart(self, exit: ProcessExit) -> bool:
        return self.policy.restarts(exit) and self._start(exit.rank)

    def join(self, request: JoinRequest) -> bool:
        rank = self.policy.join(request.name)
        return rank is not None and self._start(rank)

    def _start(self, rank: int) -> bool:
        self.board.note_start(self._latest(rank))
        self.workers.start_again(rank)
        return True

    def _latest(self, rank: int) -> GroupMember:
        return GroupMember(rank, self.run.run_dir.generation(rank))


def run_remote(
    machines: Machines,
    spec: LaunchSpec,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """As `launch`, on other hosts. A tolerance is that of an elastic strategy."""
    spec.check()
    _check_local_options(spec)
    placed = place_evenly(machines.hosts(spec.workers), spec.started, spec.workers)
    server_hosts = _server_hosts(machines, spec)
    supervisor = Supervisor(spec.started, grace_s=spec.config.grace_s)
    put = supervisor.events.put
    start_s = time.monotonic()
    with LogFiles(spec.logs, spec.appends_logs) as logs, new_run_dir() as run_dir:
        secret = spec.config.read_secret() or new_secret()
        run = RemoteRun(machines, spec, run_dir, secret, put, write, logs, OutputSink(put))
        servers = RemoteServers(run, server_hosts)
        workers = RemoteWorkers(run, placed, on_progress)
        policy = LossPolicy(run_dir, spec.workers, spec.tolerance, run.say)
        enter(spec, run_dir, [workers.host_of(rank) for rank in range(spec.workers)], write)

        def put_signal(event: Event) -> None:
            put(event)
            servers.end_start()
            workers.end_start()

        supervisor.say = run.say
        supervisor.survives = lambda exit: exit.returncode == 0
        with (
            SignalEvents(put_signal) as signals,
            serving_elastic(run, workers, policy, supervisor),
            servers,
            workers,
        ):
            servers.supervise(supervisor)
            supervisor.workers = workers.start_all(servers) if servers.start_all() else 0
            supervisor.run(workers, servers, supervisor.survives, run_dir)
        stderr: dict[Role, list[LineForwarder]] = {
            "worker": workers.stderr,
            "server": servers.stderr,
        }
        failures = supervisor.failures(run_dir, stderr)
        finished = run_dir.finished_ranks()
        reports = tuple(run_dir.read_reports(spec.workers))
        result = RunResult(
            time.monotonic() - start_s,
            tuple(policy.lost),
            reports,
            bool(finished),
            tuple(policy.returned()),
            joined=tuple(policy.joined()),
            absent=policy.absent,
            lost_servers=tuple(servers.policy.lost),
            servers_removed=servers.policy.removed,
        )
    if supervisor.ends_by_signal(failures, finished):
        signals.raise_first()
    if supervisor.output_error is not None:
        raise supervisor.output_error
    if policy.too_few is not None:
        raise ShoalError(policy.too_few)
    if failures:
        failure = first_failure(failures)
        of_role = servers.host_of if failure.role == "server" else workers.host_of
        raise launch_error(replace(failure, host=of_role(failure.rank)), finished)
    say_losses(result, spec.workers, write)
    return result


def _server_hosts(machines: Machines, spec: LaunchSpec) -> ServerHosts:
    if not spec.servers:
        return ServerHosts(())
    hosts = machines.server_hosts(spec.servers, spec.replication)
    is_named = spec.config.coordinator is not None  # by SHOAL_COORDINATOR
    return replace(hosts, coordinator=None) if is_named else hosts


def _check_local_options(spec: LaunchSpec) -> None:
    config = spec.config
    if config.start is not None and spec.tolerance is None:
        raise BadInput("--start works with workers of this host only: leave it out with --on")
    if any(text.startswith("server:") for text in config.kill):
        raise BadInput("--kill server:… works with servers of this host only: leave out --on")


def run_attempts(
    machines: Machines,
    spec: LaunchSpec,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """As `run_remote`. An error of the script is no loss, and would come again."""
    if spec.tolerance is not None:  # only lost workers are started again
        return run_remote(machines, spec, write, on_progress)
    restarts = spec.config.restarts or 0
    spec = replace(spec, config=replace(spec.config, restarts=None))
    for count in range(1, restarts + 1):
        try:
            return run_remote(machines, spec, write, on_progress)
        except (WorkersFailed, ServerFailed) as error:
            if not error.is_loss:
                raise
            write(
                f"shoal: {_loss(error)}; all workers are started again ({count} of {restarts})\n",
                True,
            )
        spec = replace(spec, config=_after_loss(spec.config), appends_logs=True)
    return run_remote(machines, spec, write, on_progress)


def _loss(error: WorkersFailed | ServerFailed) -> str:
    """Its last line, where a worker has reported the loss of a peer with a traceback."""
    lines = str(error).strip().splitlines()
    if len(lines) == 1 or isinstance(error, ServerFailed):
        return lines[0].rstrip(":")  # what a lost server has printed last was shown
    return f"worker {error.rank} failed: {lines[-1]}"


def _after_loss(config: RunConfig) -> RunConfig:
    """--kill has killed; servers go on from their latest checkpoint."""
    saved = config.server_checkpoint
    has_saved = saved.folder is not None and bool(complete_versions(saved.folder))
    resume = saved.resume or has_saved
    return replace(config, kill=(), server_checkpoint=replace(saved, resume=resume))
