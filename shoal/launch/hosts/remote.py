"""Run a command as many workers on hosts that an engine lends, and supervise them.

run_remote ── RemoteServers ── an agent for each server                  (remote_servers.py)
           ── RemoteWorkers ── an agent on each host ── its workers      (launch/hosts/agent.py)
           ── Supervisor: the same decisions as on one host              (launch/here/supervisor.py)
           ── a board, where the strategy is elastic: workers leave and come back

run_attempts starts all workers again after a loss (`shoal run --on ENGINE --restart N`). The engine
is asked for hosts again, and may have replaced the one that was lost. The script runs from its
start; what it loads (`job.load`, `--server-checkpoint`) is what it goes on from.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shoal.comm.members.network_board import ServedBoard
from shoal.comm.store.service import StoreService
from shoal.errors import BadInput, ServerFailed, WorkersFailed
from shoal.launch.here.local import LaunchSpec, enter
from shoal.launch.here.output import LogFiles, OnProgress, OutputSink, Write, print_lines
from shoal.launch.here.running import join_requests
from shoal.launch.here.supervisor import Event, SignalEvents
from shoal.launch.hosts.machines import Machines, ServerHosts, place_evenly
from shoal.launch.hosts.remote_servers import RemoteRun, RemoteServers
from shoal.launch.hosts.remote_workers import RemoteWorkers
from shoal.launch.losses.loss_report import RunResult
from shoal.launch.losses.lost_workers import LossPolicy
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import new_run_dir
from shoal.runtime.secret import new_secret


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
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with LogFiles(spec.logs, spec.appends_logs) as logs, new_run_dir() as run_dir:
        secret = spec.config.read_secret() or new_secret()
        sink = OutputSink(events.put)
        run = RemoteRun(spec, run_dir, events, write, logs, sink, machines, secret)
        servers = RemoteServers(run, server_hosts)
        workers = RemoteWorkers(run, placed, on_progress)
        supervisor = run.supervisor(servers.policy)
        enter(spec, run_dir, write, hosts=[workers.host_of(rank) for rank in range(spec.workers)])

        def put_signal(event: Event) -> None:
            events.put(event)
            servers.end_start()
            workers.end_start()

        with (
            SignalEvents(put_signal) as signals,
            _serving_board(run, workers, supervisor.policy),
            servers,
            workers,
        ):
            supervisor.workers = workers.start_all(servers) if servers.start_all() else 0
            supervisor.run(workers, servers)
        return supervisor.result(spec.workers, signals, write)


@contextmanager
def _serving_board(run: RemoteRun, workers: RemoteWorkers, policy: LossPolicy) -> Iterator[None]:
    """While the block runs, workers of an elastic run find its board, which this process serves.

    The board says which processes were started and which have exited.
    """
    if run.spec.tolerance is None:
        yield
        return
    listener = run.machines.listen()
    host, port = listener.getsockname()[:2]
    service = StoreService(host, port, run.secret, listener, workers.lose_agent)
    try:
        workers.serve(ServedBoard(service), f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        for rank in range(run.spec.started, run.spec.workers):  # the others do not wait for them
            policy.note_absent(rank)
            workers.note_exit(rank)
        with join_requests(run.run_dir, run.events.put):
            yield
    finally:
        service.close()


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
