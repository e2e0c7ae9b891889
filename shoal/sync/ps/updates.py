"""Where the optimizer runs, and what a pull brings.

UpdateOnServers   ps(update="server"): weights, which are copied into the model
UpdateInPlace     the same; the model lies in the memory that servers write to
UpdateOnWorkers   ps(update="worker"): the sum of the gradients, to which a worker applies its own
                  optimizer
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.replica.flat.params import FlatParams
from shoal.replica.split.shard import ReplicaShard
from shoal.runtime.trace import WAIT
from shoal.server.client.client import Client, PullResult
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.residuals import synchronize_copies

Tell = Callable[[str], list[str]]


class Updates:
    """Chosen once, when the worker is built."""

    def __init__(
        self,
        flat: FlatParams,
        update: OptimizerStep,
        client: Client,
        copies: ReplicaShard | None = None,
    ):
        """`copies` are parameters of which the servers of several shards hold one each."""
        self.flat = flat
        self.update = update
        self.client = client
        self.copies = copies

    @property
    def served_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose state the servers keep."""
        return None

    def learning_rate(self, step: int) -> float | None:
        """What the servers update with in this step; None: as before."""
        return None

    def take(self, result: PullResult) -> None:
        """Use what a pull has brought."""
        raise NotImplementedError

    def finish_step(self) -> None:
        """The step was pushed."""
        raise NotImplementedError


class UpdateOnServers(Updates):
    @property
    def served_optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def learning_rate(self, step: int) -> float | None:
        return self.update.learning_rate(step)

    def take(self, result: PullResult) -> None:
        with self.update.tracer.span(WAIT, f"copy weights of version {result.version}"):
            params = slice(self.flat.offset, self.flat.size)
            self.flat.data[params].copy_(self.client.inbox[params])
            synchronize_copies(self.flat, self.flat.data, self.copies)
        self.flat.zero_grad()

    def finish_step(self) -> None:
        self.update.steps += 1


class UpdateInPlace(UpdateOnServers):
    """Servers write only while this worker waits for them. On one host all workers share memory."""

    def __init__(self, flat: FlatParams, update: OptimizerStep, client: Client, tell: Tell):
        super().__init__(flat, update, client)
        is_shared = client.share_weights(tell)
        flat.move_to(client.inbox, copy=not is_shared or client.rank == 0)

    def take(self, result: PullResult) -> None:
        self.flat.zero_grad()


class UpdateOnWorkers(Updates):
    def take(self, result: PullResult) -> None:
        grads = self.flat.grads
        with self.update.tracer.span(WAIT, f"copy gradients of version {result.version}"):
            params = slice(self.flat.offset, self.flat.size)
            grads.buffer[params].copy_(self.client.inbox[params])
            synchronize_copies(self.flat, grads.buffer, self.copies)
        grads.header.copy_(result.loss_flags)
        grads.publish()

    def finish_step(self) -> None:
        self.update.apply()
        self.flat.zero_grad()
