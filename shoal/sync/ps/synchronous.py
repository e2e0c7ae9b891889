"""One update per step, with the gradients of all workers: the result of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from shoal.server.protocol.messages import Ack, Commit
from shoal.sync.ps.push import GradientPush
from shoal.sync.ps.updates import Updates
from shoal.sync.ps.worker import PsContext, PsWorker

T = TypeVar("T")


class SynchronousPs(PsWorker):
    """Every step waits for all workers; the loss is that of the global batch."""

    def __init__(
        self,
        context: PsContext,
        push: GradientPush,
        updates: Updates,
        exchange_norm: Callable[[], None] | None = None,
    ):
        """`exchange_norm` gives the leader the norm to clip by, before it answers a commit."""
        self._exchange_norm = exchange_norm
        super().__init__(context, push, updates, context.client)

    def begin(self) -> None:
        self.push.begin()

    def finish(self) -> None:
        self.collect()
        self._updates.finish_step()

    def collect(self) -> None:
        step = self._pushes
        self._commit(step)
        result = self._take(self.client.pull(step + 1, step + 1))
        self._loss = result.loss_flags[0].to(self.flat.device)
        self._pushes += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._loss.clone()

    def _decide(self, commit: Commit, loss_flags: Tensor) -> Ack:
        return self.client.commit(commit, loss_flags, self._exchange_norm)

    def _take_latest(self) -> None:
        return None  # `finish` has taken it

    def _on_lowest_survivor(self, action: Callable[[], T]) -> T | None:
        return action() if self._is_lowest_survivor else None

    def _send_state(self) -> None:
        self._pushes = self.update.steps  # one a step, unless a loop collects several times
        super()._send_state()
        self._barrier()

    def state(self) -> dict[str, Tensor]:
        saved = super().state()
        if self.push.has_state:
            self._barrier()  # no worker leaves before its deposit was collected
        return saved
