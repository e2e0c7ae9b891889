"""Run a command as many workers on hosts that an engine lends, and supervise them.

run_remote ── RemoteServers ── an agent for each server                  (remote_servers.py)
           ── RemoteWorkers ── an agent on each host ── its workers      (launch/agent.py)
           ── Supervisor: the same decisions as on one host              (launch/supervisor.py)
           ── a board, where the strategy is elastic                     (remote_elastic.py)
"""

from __future__ import annotations

import time
from dataclasses import replace

from shoal.errors import BadInput, ShoalError
from shoal.launch.agent_processes import OutputSink
from shoal.launch.failures import first_failure, launch_error
from shoal.launch.local import LaunchSpec, RunResult, enter, say_losses
from shoal.launch.log_files import LogFiles
from shoal.launch.lost_workers import LossPolicy
from shoal.launch.machines import Machines, ServerHosts
from shoal.launch.output import LineForwarder, OnProgress, Write, print_lines
from shoal.launch.placing import place_evenly
from shoal.launch.processes import Role
from shoal.launch.remote_elastic import serving_elastic
from shoal.launch.remote_run import RemoteRun
from shoal.launch.remote_servers import RemoteServers
from shoal.launch.remote_workers import RemoteWorkers
from shoal.launch.supervisor import Event, SignalEvents, Supervisor
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
