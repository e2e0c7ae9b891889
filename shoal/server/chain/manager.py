"""What a copy asks of the coordinator: which configuration, when, and whether to ask again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from shoal.server.chain.config import NO_CONFIG, ChainConfig
from shoal.server.chain.messages import Effect
from shoal.server.chain.node import ChainNode
from shoal.server.chain.read_lease import ReadLease

NOTHING: Mapping[int, Collection[int]] = MappingProxyType({})


class Fetch(msgspec.Struct, frozen=True):
    """Read the configuration, and after it who is alive. Then call `fetched`, with this request."""

    lease: int


class Swap(msgspec.Struct, frozen=True):
    """Write it if the stored one has this version. Then call `swapped`, or `conflicted`."""

    config: ChainConfig
    version: int


CoordinatorRequest: TypeAlias = Fetch | Swap


class ChainManager:
    """Decides for one copy. The process around it asks `next_request`, carries the request out
    (one at a time), and reports the answer; where there is none it calls nothing and asks again
    after a while. The methods that report return effects of the node.

        look()                      something may have changed: a watch, a broken connection,
                                    `Refetch`, `ChangeConfig`, a tick
        fetched(…) swapped(…)       answers
        conflicted()                the compare-and-set was refused
        lease.granted(…) …          see ReadLease

    Members whose lease has ended are removed by the first member that is alive. A tail that has
    asked for one more member repeats that until some later epoch is known. Where two neighbours are
    alive and do not reach each other, one leaves: it gives up its lease first, so it answers no
    read alone, and comes back behind the tail. `alive` has the incarnation of each copy with a
    lease, by copy number; `unreachable`, whom each does not reach. `founders` make up the first
    configuration, as soon as all are alive.
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

    def next_request(self, now_s: float) -> CoordinatorRequest | None:
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
        unreachable: Mapping[int, Collection[int]] = NOTHING,
    ) -> list[Effect]:
        config = config or NO_CONFIG
        self.lease.saw(config.epoch, request.lease)
        effects = self._know(config, version)
        if config.epoch == self.node.epoch:
            self._alive = alive
            self._unreachable = unreachable
            self._must_look = False
        return effects

    def swapped(self, request: Swap, version: int) -> list[Effect]:
        return self._know(request.config, version)

    def conflicted(self) -> None:
        self._must_look = True

    def _know(self, config: ChainConfig, version: int) -> list[Effect]:
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
            return self._first()
        if not self.node.is_member:
            return None
        alive = [m for m in config.members if self._is_alive(config, m)]
        lost = set(config.members) - {*alive, self.node.me}
        if self.node.asked is not None:
            return self._asked_or_renewed(self.node.asked)
        if lost and alive[:1] == [self.node.me] and self.lease.is_settled(now_s):
            return config.without(lost)
        if not lost and who_leaves(config.members, self._unreachable) == self.node.me:
            return config.without({self.node.me})
        return config.renewed() if self.lease.needs_epoch(config.epoch) else None

    def _asked_or_renewed(self, asked: ChainConfig) -> ChainConfig:
        """Either ends the epoch, so that the tail knows where it is."""
        is_there = self._is_alive(asked, asked.members[-1])
        return asked if is_there else self.node.config.renewed()

    def _first(self) -> ChainConfig | None:
        alive = self._alive or {}
        node = self.node
        is_first = node.me == min(self._founders) and alive.get(node.me) == node.incarnation
        if not is_first or not set(self._founders) <= alive.keys():
            return None
        return ChainConfig(1, self._founders, tuple(alive[m] for m in self._founders))

    def _is_alive(self, config: ChainConfig, member: int) -> bool:
        alive = self._alive or {}
        return alive.get(member) == config.incarnation_of(member)


def who_leaves(members: Sequence[int], unreachable: Mapping[int, Collection[int]]) -> int | None:
    """The one that most others do not reach, the later in the chain of two alike; None if pushes
    get through.

    `unreachable` is what each member says of the others. Two are apart when both say so: one that
    has died says nothing.
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
