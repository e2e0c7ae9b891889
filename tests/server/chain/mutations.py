"""Mistakes that one could make in a chain. The simulated world has to find each of them."""

from __future__ import annotations

from copy import copy
from typing import Any

import msgspec

from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import ChainManager, Fetch, ReadLease, Swap
from shoal.server.chain.messages import Ask, ChainMessage, Confirm, Effect, Learn, Send
from shoal.server.chain.node import ChainNode, Teaching
from tests.server.chain.counters import Counters, Push, Resume
from tests.server.chain.replica import Answer, PendingRead, Replica


class HeadCommits(ChainNode):
    def propose(self, op: Any) -> tuple[int, list[Effect]]:
        position, effects = super().propose(op)
        return position, effects + self._commit(position)


class AcceptsLowerEpochs(ChainNode):
    def receive(self, sender: int, message: ChainMessage) -> list[Effect]:
        if message.epoch < self.epoch:
            message = msgspec.structs.replace(message, epoch=self.epoch)
        return super().receive(sender, message)


class CommitsWhileAdding(ChainNode):
    def _commit_alone(self) -> list[Effect]:
        return self._commit(self.position) if self.is_tail else []


class _AsksTooEarly(Teaching):
    def advance(self, config: ChainConfig, committed: int, replicas: int) -> ChainConfig | None:
        return super().advance(config, 0, replicas)


class AddsIncompleteLearner(ChainNode):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._teaching = _AsksTooEarly()


class RepairsNothing(ChainNode):
    def reconfigure(self, config: ChainConfig) -> list[Effect]:
        effects = super().reconfigure(config)
        self._successor_is_known = self.successor is not None
        return [e for e in effects if not isinstance(e, Send) or isinstance(e.message, Learn)]


class SkipsPositions(ChainNode):
    def _append_in_order(self, message: Any) -> list[Effect]:
        return self._append(message.op) if message.position > self.position else []


class AcceptsRepeats(ChainNode):
    def _append_in_order(self, message: Any) -> list[Effect]:
        is_next = message.position in (self.position, self.position + 1)
        return self._append(message.op) if is_next else super()._append_in_order(message)


class ConfirmsWhileAdding(ChainNode):
    """A tail that may have been replaced says that its epoch goes on."""

    def _from_member(self, sender: int, message: Ask | Confirm) -> list[Effect]:
        if isinstance(message, Ask):
            return [Send(sender, Confirm(self.epoch, message.number))]
        return super()._from_member(sender, message)


class ForgetsWhatItAsked(ChainManager):
    def next_request(self, now_s: float) -> Fetch | Swap | None:
        request = super().next_request(now_s)
        if isinstance(request, Swap) and request.config == self.node.asked:
            self.node._teaching.asked = None
            self.node._teaching.adding = None
        return request


class _CountsAtOnce(ReadLease):
    def needs_epoch(self, epoch: int) -> bool:
        return False

    def is_valid(self, epoch: int, now_s: float) -> bool:
        return now_s < self._until_s


class TrustsNewLease(ChainManager):
    def __init__(self, node: ChainNode, founders: tuple[int, ...]):
        super().__init__(node, founders, _CountsAtOnce())


class CountsAgain(Counters):
    def apply(self, op: Push | Resume) -> bool:
        assert isinstance(op, Push)
        self.sums[op.key] += 4**op.number
        return True


class SnapshotWithoutTable(Counters):
    def copy(self) -> Counters:
        other = super().copy()
        other.table = {}
        return other


def replica(**parts: Any) -> type[Replica]:
    return type("MutatedReplica", (Replica,), parts)


class ReadsBeforeItApplies(Replica):
    def read(self, key: int, answer: Answer) -> None:
        super().read(key, answer)
        for read in self.reads:
            read.after = 0
        self.advance_waiting()


class ComesBackAsItself(Replica):
    def reset(self) -> None:
        super().reset()
        self.incarnation = self.node.incarnation = 1


class ReadsDirty(Replica):
    def may_show(self, read: PendingRead) -> bool:
        return True


class ReadsAlone(Replica):
    is_leased = True  # type: ignore[assignment]


class AsksOnce(Replica):
    def ask_again(self) -> None:
        return None


class LeavesWithItsLease(ChainManager):
    def next_request(self, now_s: float) -> Fetch | Swap | None:
        lease = copy(self.lease)
        request = super().next_request(now_s)
        self.lease.__dict__.update(lease.__dict__)
        return request


MUTATIONS: dict[str, type[Replica]] = {
    "the head acknowledges before the tail has it": replica(node_type=HeadCommits),
    "the tail commits alone while it adds a learner": replica(node_type=CommitsWhileAdding),
    "a learner is added before it has everything": replica(node_type=AddsIncompleteLearner),
    "a new successor gets nothing of what it lacks": replica(node_type=RepairsNothing),
    "entries are taken in the order in which they come": replica(node_type=SkipsPositions),
    "an entry that comes twice is taken twice": replica(node_type=AcceptsRepeats),
    "an unknown outcome is taken for a refusal": replica(manager_type=ForgetsWhatItAsked),
    "a new lease counts at once": replica(manager_type=TrustsNewLease),
    "pushes are not deduplicated": replica(state_type=CountsAgain),
    "a snapshot lacks the table of pushes": replica(state_type=SnapshotWithoutTable),
    "a read does not wait for what is logged": ReadsBeforeItApplies,
    "a restarted replica is a member at once": ComesBackAsItself,
    "a read shows what is not committed": ReadsDirty,
    "reads need no lease": ReadsAlone,
    "an answer that was lost is not asked for again": AsksOnce,
    "a member that leaves keeps its lease": replica(manager_type=LeavesWithItsLease),
}
