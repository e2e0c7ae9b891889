"""Elastic runs on lent hosts: workers leave and come back while the others go on.

The launcher serves the board of the run, at an address that the hosts reach, and notes on it which
processes were started and which have exited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.comm.board import GroupMember
from shoal.comm.board_log import ServedBoard
from shoal.comm.guarded_store.service import StoreService
from shoal.launch.joining import JoinRequest, JoinRequests
from shoal.launch.lost_workers import LossPolicy
from shoal.launch.processes import ProcessExit
from shoal.launch.remote_run import RemoteRun
from shoal.launch.remote_workers import RemoteWorkers
from shoal.launch.supervisor import Supervisor


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
        with JoinRequests(run.run_dir, run.put, is_open=True):
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
