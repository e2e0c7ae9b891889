"""Mistakes that the harness has to find: each takes away one protection of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

from safetensors import SafetensorError

from shoal.server import messages
from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import ChainManager
from shoal.server.chain.node import ChainNode
from shoal.server.client.link import ServerLink
from shoal.server.consistency import ImpossiblePush, Ledger, PushVerdict
from shoal.server.member import runtime
from shoal.server.member.core import Waiter
from shoal.server.member.runtime import ChainRuntime
from shoal.server.model.log import Log
from shoal.server.model.membership import Member
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import PushBuffer
from shoal.server.model.state import ModelState
from shoal.server.process import shard_file
from shoal.server.process.peer import Peer
from shoal.train.step.cut_batch import BatchCutter


def _push_counts_again(stack: ExitStack) -> None:
    """A push whose acknowledgement was lost is sent again, and counts once more."""
    judge, apply = Ledger.judge, ModelState._apply_push

    def judged(self: Ledger, worker: int, step: int) -> PushVerdict:
        try:
            return judge(self, worker, step)
        except ImpossiblePush:
            return "admitted"

    def applied(self: ModelState, push: messages.PushDecided) -> None:
        self.decided[push.worker] = push.sequence - 1
        apply(self, push)

    for owner, name, by in (
        (PushBuffer, "is_repeated", lambda self, sequence: False),
        (PushBuffer, "expect", lambda self, sequence: None),
        (Ledger, "judge", judged),
        (ModelState, "_apply_push", applied),
    ):
        stack.enter_context(mock.patch.object(owner, name, by))


def _gradients_without_weights(stack: ExitStack) -> None:
    """Each worker counts the same, however many samples it has."""

    def weights(self: BatchCutter, counts: Sequence[float], *_: Any) -> list[float]:
        return [float(count > 0) / (self.group.size * len(counts)) for count in counts]

    stack.enter_context(mock.patch.object(BatchCutter, "_weights", weights))


def _a_copy_comes_back_as_itself(stack: ExitStack) -> None:
    """A copy of a server that was started again is taken for the one before, which had a state."""

    def has(self: ChainConfig, member: int, incarnation: int) -> bool:
        return member in self.members

    def is_alive(self: ChainManager, config: ChainConfig, member: int) -> bool:
        return member in (self._alive or {})

    stack.enter_context(mock.patch.object(ChainConfig, "has", has))
    stack.enter_context(mock.patch.object(ChainManager, "_is_alive", is_alive))


def _any_epoch_is_served(stack: ExitStack) -> None:
    """A server takes requests of another epoch of its chain for those of its own."""
    check = ChainRuntime.check_epoch

    def checked(self: ChainRuntime, epoch: int) -> None:
        check(self, self.node.epoch)

    stack.enter_context(mock.patch.object(ChainRuntime, "check_epoch", checked))


def _no_bound(stack: ExitStack) -> None:
    """Under bounded staleness no worker waits for the slowest one."""
    may_start = Ledger.may_start

    def starts(self: Ledger, step: int) -> bool:
        return self.rule.staleness is not None or may_start(self, step)

    stack.enter_context(mock.patch.object(Ledger, "may_start", starts))


def _answers_early(stack: ExitStack) -> None:
    """A strong head answers a push when it has it itself."""

    def waiter(node: ChainNode, position: int, *_: Any) -> Waiter:
        return Waiter(node, position, is_early=True)

    stack.enter_context(mock.patch.object(runtime, "Waiter", waiter))


def _gradients_are_missing(stack: ExitStack) -> None:
    """A worker goes on behind a request that failed, and its server takes what has come."""

    def checked(self: ServedModel, member: Member, sequence: int, commit: Any) -> None:
        member.pushes.expect(sequence)

    stack.enter_context(mock.patch.object(ServerLink, "call", ServerLink._carry_out))
    stack.enter_context(mock.patch.object(ServedModel, "check_push", checked))


def _quorum_counts_all(stack: ExitStack) -> None:
    """The update of a quorum is divided as if all workers had pushed."""
    stack.enter_context(mock.patch.object(Log, "_divisor", lambda self: 1.0))


def _half_a_checkpoint(stack: ExitStack) -> None:
    """A server takes a file for written that had no room on its disk."""
    write = shard_file.write_tensors

    def written(*given: Any) -> None:
        with suppress(SafetensorError):
            write(*given)

    stack.enter_context(mock.patch.object(shard_file, "write_tensors", written))


def _counts_a_half_twice(stack: ExitStack) -> None:
    """What came of a push over a connection that broke stays, and it is sent again."""
    enter = Peer.enter

    def entered(self: Peer, model: ServedModel) -> None:
        pushes = model.membership.members[self.worker].pushes
        received, received_bytes = list(pushes.received), pushes.received_bytes
        enter(self, model)
        pushes.received, pushes.received_bytes = received, received_bytes

    stack.enter_context(mock.patch.object(Peer, "enter", entered))


def _reads_the_former_process(stack: ExitStack) -> None:
    """The pushes of a worker that came back are looked for where its former process put them."""

    def returned(self: ModelState, joined: messages.WorkerJoined) -> None:
        self.ledger.rejoin(joined.worker, joined.step)

    stack.enter_context(mock.patch.object(ModelState, "_apply_return", returned))


class Mistake(NamedTuple):
    plant: Callable[[ExitStack], None]
    found_by: int  # the first seed; `--planted NAME --seeds 0:300` says it again


MISTAKES = {
    "ignored-staleness": Mistake(_no_bound, 4),
    "early-answer": Mistake(_answers_early, 0),
    "missing-gradients": Mistake(_gradients_are_missing, 3),
    "whole-quorum": Mistake(_quorum_counts_all, 16),
    "half-checkpoint": Mistake(_half_a_checkpoint, 27),
    "half-twice": Mistake(_counts_a_half_twice, 34),
    "former-process": Mistake(_reads_the_former_process, 5),
    "lost-acknowledgement": Mistake(_push_counts_again, 57),
    "unweighted-gradient": Mistake(_gradients_without_weights, 0),
    "stale-incarnation": Mistake(_a_copy_comes_back_as_itself, 59),
    "stale-epoch": Mistake(_any_epoch_is_served, 0),
}


@contextmanager
def planted_mistake(name: str | None) -> Iterator[None]:
    """While the block runs, Shoal makes this mistake."""
    with ExitStack() as stack:
        if name is not None:
            MISTAKES[name].plant(stack)
        yield
