"""Which servers hold the state of their shard, as far as the launcher knows.

The coordinator says who is in each chain, processes say whether they live. A server that was
started again has no state until its chain has taken it in. One that lives and does not renew its
lease is removed by the others, and comes back without what it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shoal.launch.here.process_config import Replication
from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.failures import ProcessFailure, when_lost
from shoal.runtime import clock
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.config import ServerCheckpointConfig
from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.waits import state_of
from shoal.runtime.wording import listed
from shoal.server.chain import ChainConfig
from shoal.server.coordinator import Alive, Coordinator, CoordinatorError, Listing, alive_key

_PAUSE_S = 0.2  # after a coordinator that has not answered
T = TypeVar("T")


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
    """Decides for each server that has exited whether the run continues, and who replaces it.

    Thread-safe. Before the coordinator has answered, all servers of the start are members.
    """

    def __init__(
        self,
        servers: int,
        replication: Replication,
        say: Callable[[str], None],
        checkpoint: ServerCheckpointConfig = NO_CHECKPOINTS,
        are_here: bool = True,
    ):
        """`are_here`: servers are processes of this host."""
        self._replication = replication
        self._say = say
        self._checkpoint = checkpoint
        self._are_here = are_here
        self._starts = dict.fromkeys(range(servers), 0)
        self._start_ns = clock.monotonic_ns()
        self._started_ns = dict.fromkeys(range(servers), self._start_ns)
        self._pids: dict[int, int] = {}
        self._running = set(range(servers))
        self._with_state = set(range(servers))
        self._configs: dict[int, ChainConfig] = {}  # by shard
        self._heads: dict[int, int] = {}
        self._changing = threading.RLock()
        self._shards = range(servers // replication.replicas)
        self._is_known = False  # the coordinator has answered
        self.look: Callable[[], None] = lambda: None  # asks the coordinator now
        self.removed = 0  # how often a server that lives was removed from its chain
        self.lost: list[LostServer] = []

    # ------------------------------------------------------------------ processes

    def started(self, server: int, pid: int) -> None:
        with self._changing:
            self._started_ns[server] = clock.monotonic_ns()
            self._pids[server] = pid
            self._running.add(server)

    def note(self, exit: ProcessExit) -> bool:
        """Whether what this exit means shows a moment later: others may be lost beside it."""
        with self._changing:
            self._running.discard(exit.rank)
            self._with_state.discard(exit.rank)
        return self._replication.is_on and exit.returncode not in (0, _MISTAKE)

    def survives(self, exit: ProcessExit) -> bool:
        """False when an exit that was noted ends the run."""
        if exit.returncode == 0:
            return True
        if not self._replication.is_on or exit.returncode == _MISTAKE:
            return False
        return not self.are_lost(exit.rank // self._replication.replicas)

    def replaces(self, exit: ProcessExit, may_start: bool = True) -> bool:
        """Whether another process is to take the place of this one, whose loss is survived."""
        if exit.returncode == 0:
            return False
        starts = self._starts[exit.rank] + 1
        restarts = self._replication.restarts
        is_started_again = may_start and starts <= restarts
        failure = ProcessFailure(exit.rank, exit.returncode, exit.noticed_ns, role="server")
        how = failure.ending if exit.returncode < 0 else f"ended with status {exit.returncode}"
        after_s = (exit.noticed_ns - self._start_ns) / 1e9
        age_s = (exit.noticed_ns - self._started_ns[exit.rank]) / 1e9
        shard, replica = divmod(exit.rank, self._replication.replicas)
        self.lost.append(LostServer(exit.rank, shard, replica, how, after_s, is_started_again))
        again = f"is started again ({starts} of {restarts})"
        if is_started_again:
            self._starts[exit.rank] = starts
        else:
            again = "is not started again"
        line = f"{self._replication.in_words(exit.rank)} {how} {when_lost(age_s, starts > 1)}"
        self._say(f"{line} and {again}; {self.goes_on(shard)}")
        return is_started_again

    def sentence(self, server: int) -> str:
        """What the launcher says where the run ends with this server; empty: the usual."""
        shard = server // self._replication.replicas
        if not self._replication.is_on or not self.are_lost(shard):
            return ""
        gone = f"all {self._replication.replicas} replicas of shard {shard} are lost"
        return f"{gone}, and its weights with them; {how_to_continue(self._checkpoint)}"

    def are_lost(self, shard: int) -> bool:
        """Whether no server has the state of a shard any more; before it begins there is none."""
        if self._members(shard):
            return False
        if self._is_known:
            self.look()  # one may have caught up just now
        with self._changing:
            has_begun = shard in self._configs or not self._is_known
            return has_begun and not self._members(shard)

    def goes_on(self, shard: int, but: int | None = None) -> str:
        """With whom; `but` is a server that is not to be named among those that catch up."""
        with self._changing:
            members = self._members(shard)
            late = set(self._servers(shard)) & self._running - self._with_state - {but}
        if not members:
            return f"shard {shard} has not begun"
        alone = " alone" * (len(members) == 1)
        text = f"shard {shard} goes on with {listed('replica', members)}{alone}"
        if late:
            names = listed("replica", sorted(s % self._replication.replicas for s in late))
            text += f"; {names} {'is' if len(late) == 1 else 'are'} catching up"
        return text

    def _members(self, shard: int) -> list[int]:
        """The replicas of a shard that hold its state."""
        with self._changing:
            held = [s for s in self._servers(shard) if s in self._with_state and self._lives(s)]
            return [server % self._replication.replicas for server in held]

    def _servers(self, shard: int) -> range:
        replicas = self._replication.replicas
        return range(shard * replicas, (shard + 1) * replicas)

    def _lives(self, server: int) -> bool:
        """Also where its exit has not been handled yet."""
        pid = self._pids.get(server) if self._are_here else None
        return server in self._running and (pid is None or state_of(pid) != "Z")

    # ------------------------------------------------------------------ the coordinator

    def see(self, listing: Listing) -> None:
        """What the coordinator holds; changes are said."""
        with self._changing:
            self._is_known = True
            for shard in self._shards:
                config = _read(listing, f"chain/{shard}", ChainConfig)
                known = self._configs.get(shard)
                if config is not None and (known is None or config.epoch >= known.epoch):
                    self._see_chain(shard, config, listing)

    def _see_chain(self, shard: int, config: ChainConfig, listing: Listing) -> None:
        is_first = shard not in self._configs
        self._configs[shard] = config
        in_words = self._replication.in_words
        servers = set(self._servers(shard))
        before = self._with_state & servers
        now = {s for s in servers if self._is_member(s, config, listing)}
        self._with_state = self._with_state - servers | now
        if is_first:
            return
        for server in filter(self._lives, sorted(before - now)):
            self.removed += 1
            removed = f"{in_words(server)} does not answer and was removed from its chain"
            self._say(f"{removed}; {self.goes_on(shard, but=server)}")
        members = self._members(shard)
        head = config.head
        if head is not None and head in members and self._heads.get(shard, 0) != head:
            self._heads[shard] = head
            self._say(f"{in_words(self._servers(shard)[head])} is the head of shard {shard} now")
        for server in sorted(now - before):
            has = listed("replica", members)
            self._say(f"{in_words(server)} has caught up; shard {shard} has {has}")

    def _is_member(self, server: int, config: ChainConfig, listing: Listing) -> bool:
        replica = server % self._replication.replicas
        if replica not in config.members or server not in self._running:
            return False
        alive = _read(listing, alive_key(server), Alive)
        if alive is None:  # its lease has ended, or it has exited
            return server in self._with_state
        is_this = alive.pid == self._pids.get(server, alive.pid)
        return is_this and config.has(replica, alive.incarnation)


def follow(coordinator: Coordinator, see: Callable[[Listing], None], over: threading.Event) -> None:
    """See what it holds until `over`; a coordinator that does not answer is asked again."""
    seen: Listing | None = None
    while not over.is_set():
        try:
            listing = coordinator.watch("", seen)
            if listing != seen:
                see(listing)
            seen = listing
        except (CoordinatorError, OSError):
            over.wait(_PAUSE_S)


def _read(listing: Listing, key: str, kind: type[T]) -> T | None:
    stored = listing.entries.get(key)
    if stored is not None:
        with suppress(msgspec.MsgspecError, ValueError):
            return msgpack_decoder(kind).decode(stored.value)
    return None


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
