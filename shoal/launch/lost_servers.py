"""Which losses of servers a run survives.

Servers without replicas are needed to the end. Where a shard has several, the run goes on while
one of them lives; a lost one is started again in the background, a few times, and catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.failures import ProcessFailure
from shoal.launch.processes import ProcessExit
from shoal.strategy.strategy import Strategy

SERVER_RESTARTS = 3  # of each server
_MISTAKE = 2  # the exit status of BadInput: it would meet the same again


@dataclass(frozen=True)
class Replication:
    """How servers are copied: server p is replica p % replicas of shard p // replicas."""

    replicas: int = 1
    consistency: str = "strong"
    restarts: int = SERVER_RESTARTS

    @property
    def is_on(self) -> bool:
        return self.replicas > 1

    def in_words(self, server: int) -> str:
        shard, replica = divmod(server, self.replicas)
        return f"server {server} (shard {shard}, replica {replica})"


SINGLE_COPY = Replication()


def replication_of(
    strategy: Strategy, workers: int, restarts: int = SERVER_RESTARTS
) -> Replication:
    sync = strategy.sync_for(workers)
    return Replication(sync.server_replicas, sync.server_consistency, restarts)


@dataclass(frozen=True)
class LostServer:
    """A server that the run continued without, or with another process in its place."""

    server: int
    shard: int
    replica: int
    how: str
    after_s: float  # since the start of the run
    is_started_again: bool


class ServerPolicy:
    """Decides for each server that has exited whether the run continues, and who replaces it."""

    def __init__(self, servers: int, replication: Replication, say: Callable[[str], None]):
        self._replication = replication
        self._say = say
        self._running = set(range(servers))
        self._starts = dict.fromkeys(range(servers), 0)
        self._start_ns = time.monotonic_ns()
        self.lost: list[LostServer] = []

    def survives(self, exit: ProcessExit) -> bool:
        """Note the exit of a server; False when it ends the run."""
        self._running.discard(exit.rank)
        if exit.returncode == 0:
            return True
        if not self._replication.is_on or exit.returncode == _MISTAKE:
            return False
        return bool(self._left(exit.rank))

    def replaces(self, exit: ProcessExit) -> bool:
        """Whether another process is to take the place of this one, whose loss is survived."""
        if exit.returncode == 0:
            return False
        starts = self._starts[exit.rank] + 1
        is_started_again = starts <= self._replication.restarts
        self._note(exit, starts, is_started_again)
        if is_started_again:
            self._starts[exit.rank] = starts
            self._running.add(exit.rank)
        return is_started_again

    def reason(self, server: int) -> str:
        """Why the run ends with the loss of this server."""
        if not self._replication.is_on or self._left(server):
            return ""
        shard = server // self._replication.replicas
        return f", the last replica of shard {shard}"

    def _left(self, server: int) -> list[int]:
        """Replicas of the same shard that run."""
        replicas = self._replication.replicas
        first = server // replicas * replicas
        return [p - first for p in range(first, first + replicas) if p in self._running]

    def _note(self, exit: ProcessExit, starts: int, is_started_again: bool) -> None:
        failure = ProcessFailure(exit.rank, exit.returncode, exit.noticed_ns, role="server")
        how = failure.ending if exit.returncode < 0 else f"ended with status {exit.returncode}"
        after_s = (exit.noticed_ns - self._start_ns) / 1e9
        shard, replica = divmod(exit.rank, self._replication.replicas)
        self.lost.append(LostServer(exit.rank, shard, replica, how, after_s, is_started_again))
        left = _list(self._left(exit.rank))
        again = "it is not started again"
        if is_started_again:
            again = f"it is started again ({starts} of {self._replication.restarts})"
        who = self._replication.in_words(exit.rank)
        self._say(f"{who} {how} after {after_s:.1f} s; shard {shard} goes on with {left}; {again}")


def without_service_s(reports: Sequence[dict[str, Any] | None]) -> float:
    """How long the worker that waited longest got no service of a shard, as workers reported."""
    found = [0.0]
    for report in reports:
        for part in (report or {}).get("sync") or []:
            found += [sum(shard) for shard in part.get("interruptions_s") or []]
    return round(max(found), 3)


def summarize_server_losses(
    lost: Sequence[LostServer], reports: Sequence[dict[str, Any] | None]
) -> str:
    """For the end of a run that succeeded."""
    return f"servers lost: {len(lost)}; {without_service_s(reports):.1f} s without service"


def _list(replicas: list[int]) -> str:
    if len(replicas) == 1:
        return f"replica {replicas[0]}"
    return f"replicas {', '.join(map(str, replicas[:-1]))} and {replicas[-1]}"
