"""A parameter server: workers push gradients and pull weights; a ledger decides what counts.

For real: shoal/server/consistency.py (the ledger), shoal/server/model/ (the weights),
shoal/sync/ps/ (the worker). There it is a process, and copies of it survive its loss.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from examples.core.flat import FlatModel
from examples.core.sync import MakeOptimizer

PATIENCE_S = 30.0


class Ledger:
    """Which pushes were counted, once each, and how far each worker has come."""

    def __init__(self, workers: int) -> None:
        self.steps_of = [0] * workers

    def admits(self, worker: int, step: int) -> bool:
        """False for a push that was counted before: a worker sends again what was not answered."""
        if step > self.steps_of[worker]:
            raise ValueError(f"worker {worker} pushes step {step} before {self.steps_of[worker]}")
        return step == self.steps_of[worker]

    def count(self, worker: int) -> None:
        self.steps_of[worker] += 1

    @property
    def complete_steps(self) -> int:
        return min(self.steps_of)


class Server:
    """Synchronous with `staleness=0`: one update a step, of all workers' gradients.

    With a staleness of k, every push is an update of its own, and a worker waits if it would
    be more than k steps ahead of the slowest one.
    """

    def __init__(
        self, values: Tensor, make_optimizer: MakeOptimizer, workers: int, staleness: int = 0
    ) -> None:
        self.weights = nn.Parameter(values.clone())
        self.optimizer = make_optimizer([self.weights])
        self.ledger = Ledger(workers)
        self.staleness = staleness
        self._waiting: dict[int, Tensor] = {}  # pushes of this step, by worker
        self._changed = threading.Condition()

    def push(self, worker: int, step: int, gradients: Tensor) -> None:
        with self._changed:
            if not self.ledger.admits(worker, step):
                return
            self.ledger.count(worker)
            if self.staleness:
                self._update(gradients)
            else:
                self._waiting[worker] = gradients.clone()
                if len(self._waiting) == len(self.ledger.steps_of):
                    in_order = [self._waiting[worker] for worker in sorted(self._waiting)]
                    self._update(torch.stack(in_order).sum(0))
                    self._waiting.clear()
            self._changed.notify_all()

    def _update(self, gradients: Tensor) -> None:
        self.weights.grad = gradients
        self.optimizer.step()

    def pull(self, step: int) -> Tensor:
        """The weights for this step, as soon as no worker is too far behind it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_near(step), timeout=PATIENCE_S):
                slowest = self.ledger.steps_of.index(self.ledger.complete_steps)
                raise TimeoutError(f"step {step} waits for the push of worker {slowest}")
            return self.weights.detach().clone()

    def _is_near(self, step: int) -> bool:
        return self.ledger.complete_steps >= step - self.staleness


class PsWorker:
    """A worker's three moments: pull, nothing, push."""

    def __init__(self, flat: FlatModel, server: Server, worker: int) -> None:
        self.flat = flat
        self.server = server
        self.worker = worker
        self.step = 0

    def begin(self) -> None:
        self.flat.values.copy_(self.server.pull(self.step))

    def reduce(self, bucket: slice) -> None:
        pass  # for real each bucket is pushed here, while backward goes on

    def finish(self) -> None:
        self.server.push(self.worker, self.step, self.flat.gradients)
        self.step += 1
