"""Mistakes that the harness has to find: each takes away one protection of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from shoal.server import messages
from shoal.server.chain import ChainConfig
from shoal.server.chain.manager import ChainManager
from shoal.server.consistency import ImpossiblePush, Ledger, PushVerdict
from shoal.server.member.runtime import ChainRuntime
from shoal.server.model.shard import PushBuffer
from shoal.server.model.state import ModelState
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


MISTAKES: dict[str, Callable[[ExitStack], None]] = {
    "lost-acknowledgement": _push_counts_again,
    "unweighted-gradient": _gradients_without_weights,
    "stale-incarnation": _a_copy_comes_back_as_itself,
    "stale-epoch": _any_epoch_is_served,
}


@contextmanager
def planted_mistake(name: str | None) -> Iterator[None]:
    """While the block runs, Shoal makes this mistake."""
    with ExitStack() as stack:
        if name is not None:
            MISTAKES[name](stack)
        yield
