"""Which losses of servers a run survives.

Servers without replicas are needed to the end. Where a shard has several, the run goes on while
one that holds its state lives; a lost one is started again in the background, a few times, and
catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.here.process_config import Replication
from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.chain_members import ChainMembers
from shoal.launch.losses.failures import ProcessFailure, when_lost
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.config import ServerCheckpointConfig

_MISTAKE = 2  # the exit status of BadInput: it would meet the same again
NO_CHECKPOINTS = ServerCheckpointConfig()


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

    def __init__(
        self,
        servers: int,
        replication: Replication,
        say: Callable[[str], None],
        members: ChainMembers | None = None,
        checkpoint: ServerCheckpointConfig = NO_CHECKPOINTS,
    ):
        self._replication = replication
        self._say = say
        self._members = members or ChainMembers(replication, servers, say)
        self._checkpoint = checkpoint
        self._starts = dict.fromkeys(range(servers), 0)
        self._start_ns = time.monotonic_ns()
        self._started_ns = dict.fromkeys(range(servers), self._start_ns)
        self.lost: list[LostServer] = []

    @property
    def removed(self) -> int:
        """How often a server that lives was removed from its chain."""
        return self._members.removed

    def started(self, server: int, pid: int) -> None:
        self._started_ns[server] = time.monotonic_ns()
        self._members.started(server, pid)

    def note(self, exit: ProcessExit) -> bool:
        """Whether what this exit means shows a moment later: others may be lost beside it."""
        self._members.exited(exit.rank)
        return self._replication.is_on and exit.returncode not in (0, _MISTAKE)

    def survives(self, exit: ProcessExit) -> bool:
        """False when an exit that was noted ends the run."""
        if exit.returncode == 0:
            return True
        if not self._replication.is_on or exit.returncode == _MISTAKE:
            return False
        return not self._members.are_lost(self._replication.shard_of(exit.rank))

    def replaces(self, exit: ProcessExit, may_start: bool = True) -> bool:
        """Whether another process is to take the place of this one, whose loss is survived."""
        if exit.returncode == 0:
            return False
        starts = self._starts[exit.rank] + 1
        is_started_again = may_start and starts <= self._replication.restarts
        self._say_lost(exit, starts, is_started_again)
        if is_started_again:
            self._starts[exit.rank] = starts
        return is_started_again

    def sentence(self, server: int) -> str:
        """What the launcher says where the run ends with this server; empty: the usual."""
        shard = self._replication.shard_of(server)
        if not self._replication.is_on or not self._members.are_lost(shard):
            return ""
        gone = f"all {self._replication.replicas} replicas of shard {shard} are lost"
        return f"{gone}, and its weights with them; {how_to_continue(self._checkpoint)}"

    def _say_lost(self, exit: ProcessExit, starts: int, is_started_again: bool) -> None:
        failure = ProcessFailure(exit.rank, exit.returncode, exit.noticed_ns, role="server")
        how = failure.ending if exit.returncode < 0 else f"ended with status {exit.returncode}"
        after_s = (exit.noticed_ns - self._start_ns) / 1e9
        age_s = (exit.noticed_ns - self._started_ns[exit.rank]) / 1e9
        shard, replica = divmod(exit.rank, self._replication.replicas)
        self.lost.append(LostServer(exit.rank, shard, replica, how, after_s, is_started_again))
        again = "and is not started again"
        if is_started_again:
            again = f"and is started again ({starts} of {self._replication.restarts})"
        when = when_lost(age_s, is_again=starts > 1)
        goes_on = self._members.goes_on(shard)
        self._say(f"{self._replication.in_words(exit.rank)} {how} {when} {again}; {goes_on}")


def how_to_continue(checkpoint: ServerCheckpointConfig) -> str:
    """After the weights were lost."""
    if checkpoint.folder is None:
        return (
            "start again, or from what job.save has saved; with --server-checkpoint DIR the "
            "servers save what they hold"
        )
    saved = complete_versions(checkpoint.folder)
    if not saved:
        return f"start again: {checkpoint.folder} has no complete checkpoint"
    return f"continue with --resume from {checkpoint.folder} (step {saved[0].number})"


def without_service_s(reports: Sequence[dict[str, Any] | None]) -> float:
    """How long the worker that waited longest got no service of a shard, as workers reported."""
    found = [0.0]
    for report in reports:
        for part in (report or {}).get("sync") or []:
            found += [sum(shard) for shard in part.get("interruptions_s") or []]
    return round(max(found), 3)


def summarize_server_losses(
    lost: Sequence[LostServer], removed: int, reports: Sequence[dict[str, Any] | None]
) -> str:
    """For the end of a run that succeeded; `removed`: from their chains, while they lived."""
    count = f"servers lost: {len(lost)}"
    if removed:
        count += f", removed from their chain for a while: {removed}"
    return f"{count}; {without_service_s(reports):.1f} s without service"
