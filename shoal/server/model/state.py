"""The state that the log determines, and what each decision does to it.

    PushDecided   ledger; the push is added to the open step, or its memory is released
    StepApplied   sum, divide, clip, optimizer, tables; ledger: the next step begins
    WorkerLeft    ledger
    WorkerJoined  ledger; the buffer of the new process takes the place of the old one
    PushesLost    ledger; steps do not wait for these pushes

Decisions are deterministic: servers that apply the same ones have the same ledger, and the
copies of one slice have the same weights and optimizer state, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from shoal.runtime import clock
from shoal.runtime.trace import OFF, Tracer
from shoal.server import messages
from shoal.server.consistency import Ledger
from shoal.server.model.shard import PendingPush, PushBuffer, Shard
from shoal.server.model.tables import Tables
from shoal.server.protocol import Refused


class OpenStep(NamedTuple):
    """A step that is complete, and waits for the norms of other servers."""

    divisor: float
    latest: messages.PushDecided


class WaitingPush(NamedTuple):
    """A push that has come while a step waits for norms. It is judged after the step."""

    worker: int
    sequence: int
    commit: messages.Commit


class ModelState:
    """Weights, optimizer state, ledger, and the pushes of the open step."""

    def __init__(
        self, spec: messages.ModelSpec, tables: Tables, device: torch.device | None = None
    ):
        self.spec = spec
        self.shard = Shard(spec, device)
        self.tables = tables
        self.ledger = Ledger(spec.rule)
        self.pushes: dict[int, PushBuffer] = {}  # by worker
        self.arriving: dict[int, PushBuffer] = {}  # of workers that came back and have not entered
        self.decided: dict[int, int] = {}  # worker -> sequence of its latest push with a verdict
        self.counted: list[messages.PushDecided] = []  # of the open step
        self.fraction = 0.0  # of the global batch that is counted in the open step
        self.is_summed = False
        self.open_step: OpenStep | None = None
        self.waiting: list[WaitingPush] = []
        self.acks: dict[
            int, messages.Ack
        ] = {}  # worker -> the answer to its latest push with a verdict
        self.has_weights = False  # a worker has given the first ones
        self.weights_from: int | None = None  # a worker that came back, and is to give them
        self.lost_pushes = 0  # were acknowledged by a server that is gone
        self.missed_updates = Counter[int]()  # between a pull and its push
        self.returns = Counter[int]()  # worker -> steps that it missed while it was away
        # what this server has answered itself
        self.repeated_pushes = 0
        self.steps_ahead = Counter[int]()  # of the slowest worker, at a pull
        self.is_from_start = True  # else it has got the state of another copy, without these
        self._latest_save = 0
        self.uses_pushes = False  # each push is a step, applied from where its gradients are
        self.tracer: Tracer = OFF
        self.on_applied: Callable[[], None] = lambda: None  # a decision, under the model's lock

    @property
    def next_save(self) -> int | None:
        """The checkpoint that counted pushes ask for; several workers ask for the same one."""
        asked = [push.save for push in self.counted if push.save is not None]
        latest = max(asked, default=0)
        return latest if latest > self._latest_save else None

    @property
    def version(self) -> int:
        return self.ledger.version

    def apply(self, decision: messages.Decision) -> None:
        if isinstance(decision, messages.PushDecided):
            self._apply_push(decision)
        elif isinstance(decision, messages.StepApplied):
            self._apply_step(decision)
        elif isinstance(decision, messages.WorkerJoined):
            self._apply_return(decision)
        elif isinstance(decision, messages.PushesLost):
            self._apply_loss(decision)
        else:
            assert isinstance(decision, messages.WorkerLeft)
            self.ledger.lose(decision.worker)
        self.on_applied()

    def norms(self, divisor: float) -> list[float]:
        """The norms of this server's gradients of the open step."""
        self._sum_pushes(divisor)
        return self.shard.norms()

    def _apply_push(self, push: messages.PushDecided) -> None:
        expected = self.decided.get(push.worker, 0) + 1
        if push.sequence != expected:
            raise Refused(
                f"push {push.sequence} of worker {push.worker} is out of order: expected {expected}"
            )
        buffer = self.pushes.get(push.worker)
        if buffer is None or buffer.committed < push.sequence:
            raise Refused(f"push {push.sequence} of worker {push.worker} is not staged here")
        self.ledger.record(push.worker, push.step, push.verdict)
        self.has_weights = True
        self.decided[push.worker] = push.sequence
        tensors, rows = buffer.staged.get(push.sequence, (None, ()))  # None: it is lost
        if push.verdict == "dropped":
            buffer.staged.pop(push.sequence, None)
            return
        if not self.spec.rule.is_synchronous:
            if tensors is not None and self.uses_pushes and not self.counted:
                self.shard.use(tensors)
            else:
                self.shard.add(tensors, first=not self.counted)
            buffer.staged.pop(push.sequence, None)
        elif tensors is not None:  # they are summed in the order of workers
            buffer.staged[push.sequence] = PendingPush(tensors, ())
        self.counted.append(push)
        self.fraction += push.batch_fraction
        self.tables.counted += [(push.worker, each) for each in rows]

    def _apply_return(self, joined: messages.WorkerJoined) -> None:
        self.ledger.rejoin(joined.worker, joined.step)
        self.decided.pop(joined.worker, None)
        buffer = self.arriving.pop(joined.worker, None)
        if buffer is not None:
            self.pushes[joined.worker] = buffer

    def _apply_loss(self, lost: messages.PushesLost) -> None:
        decided = self.decided.get(lost.worker, 0)
        self.ledger.lose_pushes(lost.worker, lost.step)
        self.decided[lost.worker] = lost.sequence
        buffer = self.pushes.get(lost.worker)
        if buffer is None:
            return
        if buffer.committed <= lost.sequence:
            buffer.skip_to(lost.sequence)
        staged = buffer.staged.items()
        buffer.staged = {n: held for n, held in staged if not decided < n <= lost.sequence}

    def _apply_step(self, step: messages.StepApplied) -> None:
        if step.version != self.version + 1:
            raise Refused(f"version {step.version} is out of order: expected {self.version + 1}")
        start_ns = clock.monotonic_ns()
        latest = self.counted[-1].worker if self.counted else None  # else all pushes are lost
        if self.counted:
            self._sum_pushes(step.divisor)
            self.shard.update(step.lr, step.clip_factor)
            self.tables.update(step.divisor)
        self.counted.clear()
        self.fraction = 0.0
        self.is_summed = False
        self._latest_save = max(self._latest_save, step.save or 0)
        self.ledger.apply()
        call = f"version {step.version}"
        end_ns = clock.monotonic_ns()
        self.tracer.add("update", start_ns, end_ns, "main", call, None, 0, latest, call)

    def _sum_pushes(self, divisor: float) -> None:
        """Once per step: with clipping, the norms are needed before the step is applied."""
        if self.is_summed:
            return
        self.is_summed = True
        if self.spec.rule.is_synchronous:
            counted = sorted((push.worker, push.sequence) for push in self.counted)
            held = [self.pushes[worker].staged.get(sequence) for worker, sequence in counted]
            self.shard.add_all([push.tensors for push in held if push is not None])
            for worker, sequence in counted:
                self.pushes[worker].staged.pop(sequence, None)
        self.shard.divide(divisor)
