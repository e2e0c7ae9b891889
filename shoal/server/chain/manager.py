"""What a copy asks of the coordinator: which configuration, when, and whether to ask again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec

from shoal.server.chain import NO_CONFIG, ChainConfig
from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainNode

_OF_TTL = 0.9  # clocks run at rates that differ by less
FOUNDING_S = 30.0  # founders that have not come by then are left out


class ReadLease:
    """A copy's lease at the coordinator, and the epoch from which on it counts.

    A member is removed when the coordinator says that its lease has ended. So while it holds one,
    it is a member of the latest configuration, and everything committed is in its log. The value
    is read first and the lease is checked after: a pause at any moment is then harmless.

    A removal may be under way that was decided before this lease began. It fails once there is a
    later epoch than the one that was current after the lease had begun: the lease counts from then.
    """

    def __init__(self) -> None:
        self.number = 0  # of the present lease
        self._after_epoch: int | None = None  # None: not known yet
        self.lost()

    def granted(self, asked_s: float, ttl_s: float) -> None:
        """There is a new lease, asked for at `asked_s`, and alive/<process> is bound to it."""
        self.number += 1
        self._after_epoch = None  # first: another thread may ask for `is_valid`
        self.is_held = True
        self._until_s = asked_s + _OF_TTL * ttl_s
        self._settled_s = asked_s + ttl_s

    def renewed(self, asked_s: float, left_s: float) -> None:
        if self.is_held:
            self._until_s = max(self._until_s, asked_s + _OF_TTL * left_s)

    def lost(self) -> None:
        self.is_held = False
        self._until_s = float("-inf")
        self._settled_s = float("inf")
        self._after_epoch = None

    def saw(self, epoch: int, number: int) -> None:
        """This epoch was current at the coordinator, asked for when lease `number` had begun."""
        if self.is_held and number == self.number and self._after_epoch is None:
            self._after_epoch = epoch

    def needs_epoch(self, epoch: int) -> bool:
        """Whether the lease would count if there were a later epoch than this one."""
        return self._after_epoch is not None and epoch <= self._after_epoch

    def is_valid(self, epoch: int, now_s: float) -> bool:
        """Whether a member in this epoch may answer what it has read before `now_s`."""
        return now_s < self._until_s and self._after_epoch is not None and epoch > self._after_epoch

    def is_settled(self, now_s: float, for_s: float = 0.0) -> bool:
        """Whether others have had time to get a lease, too, if all had lost theirs."""
        return now_s >= self._settled_s + for_s


class Fetch(msgspec.Struct, frozen=True):
    """Read the configuration, and after it who is alive. Then call `fetched`, with this request."""

    lease: int


class Swap(msgspec.Struct, frozen=True):
    """Write it if the stored one has this version. Then call `know`, or `look`."""

    config: ChainConfig
    version: int


class ChainManager:
    """Decides for one copy. The process around it asks `next_request`, carries it out and reports
    the answer (`fetched`, `know`), or asks again after a while; it calls `look` after a conflict
    and when something may have changed. The methods that report return effects of the node.

    Members whose lease has ended are removed by the first member that is alive. A tail that has
    asked for one more member repeats that until some later epoch is known. Where two neighbours are
    alive and do not reach each other, one leaves: it gives up its lease first, so it answers no
    read alone, and comes back behind the tail. `founders` make up the first configuration; those
    that do not come become members later, as others that have no state.
    """

    def __init__(self, node: ChainNode, founders: tuple[int, ...], lease: ReadLease | None = None):
        self.node = node
        self.lease = lease or ReadLease()
        self._founders = founders
        self._version = 0  # of the configuration that is known
        self._alive: dict[int, int] | None = None  # None: not known since that configuration
        self._unreachable: Mapping[int, Collection[int]] = {}
        self._must_look = True

    def look(self) -> None:
        self._must_look = True

    def next_request(self, now_s: float) -> Fetch | Swap | None:
        """None before the first lease: what is fetched then would have to be fetched again."""
        if not self.lease.number:
            return None
        if self._must_look or self._alive is None:
            return Fetch(self.lease.number)
        config = self._wanted(now_s)
        if config is not None and self.node.is_member and self.node.me not in config.members:
            self.lease.lost()  # whatever becomes of the request
        return None if config is None else Swap(config, self._version)

    def fetched(
        self,
        request: Fetch,
        config: ChainConfig | None,
        version: int,
        alive: dict[int, int],
        unreachable: Mapping[int, Collection[int]] | None = None,
    ) -> list[Effect]:
        config = config or NO_CONFIG
        self.lease.saw(config.epoch, request.lease)
        effects = self.know(config, version)
        if config.epoch == self.node.epoch:
            self._alive = alive
            self._unreachable = unreachable or {}
            self._must_look = False
        return effects

    def know(self, config: ChainConfig, version: int) -> list[Effect]:
        """Who is alive must be looked up after each new configuration: a copy that has got a
        new lease before it must not be removed for want of the old one."""
        if config.epoch <= self.node.epoch:
            return []
        self._version = version
        self._alive = None
        return self.node.reconfigure(config)

    def _wanted(self, now_s: float) -> ChainConfig | None:
        """The configuration that should follow, if it is for this copy to ask for it."""
        config = self.node.config
        if config.epoch == 0:
            return self._first(now_s)
        if not self.node.is_member:
            return None
        alive = [m for m in config.members if self._is_alive(config, m)]
        lost = set(config.members) - {*alive, self.node.me}
        if (asked := self.node.asked) is not None:
            # either ends the epoch, so that the tail knows where it is
            return asked if self._is_alive(asked, asked.members[-1]) else config.without()
        if lost and alive[:1] == [self.node.me] and self.lease.is_settled(now_s):
            return config.without(lost)
        if not lost and who_leaves(config.members, self._unreachable) == self.node.me:
            return config.without({self.node.me})
        return config.without() if self.lease.needs_epoch(config.epoch) else None

    def _first(self, now_s: float) -> ChainConfig | None:
        """Of all founders, or of those that are alive where others were lost before."""
        alive = self._alive or {}
        node = self.node
        there = tuple(m for m in self._founders if m in alive)
        is_complete = there == self._founders or self.lease.is_settled(now_s, FOUNDING_S)
        if there[:1] != (node.me,) or alive[node.me] != node.incarnation or not is_complete:
            return None
        return ChainConfig(1, there, tuple(alive[m] for m in there))

    def _is_alive(self, config: ChainConfig, member: int) -> bool:
        alive = self._alive or {}
        return alive.get(member) == config.incarnation_of(member)


def who_leaves(members: Sequence[int], unreachable: Mapping[int, Collection[int]]) -> int | None:
    """The one that most others do not reach, the later of two alike; None if pushes get through.

    Two are apart when both say so: one that has died says nothing.
    """
    apart = {
        frozenset((a, b))
        for a in members
        for b in members
        if b in unreachable.get(a, ()) and a in unreachable.get(b, ())
    }
    broken = {member for pair in pairwise(members) if frozenset(pair) in apart for member in pair}
    if not broken:
        return None
    return max(broken, key=lambda m: (sum(m in pair for pair in apart), members.index(m)))
