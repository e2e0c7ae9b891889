"""Parameters of one model that one optimizer updates, in a loop of the user's own.

    backward   p.grad of earlier passes is set aside ─▶ buckets are reduced while it runs ─▶
               p.grad is the gradient of the global batch, plus what was set aside
    no_sync    p.grad is this worker's own, until a backward outside of it reduces the sum
    step       the optimizer steps; the other replicas get to know the weights

Where replicas update with their own gradients, or servers update, p.grad stays this worker's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.train.step.step import Step


class LoopPart:
    """A step of the job whose forward, backward and update the script calls itself."""

    def __init__(self, step: Step):
        self.step = step
        step.is_own_loop = True
        step.sync.shows_gradients = True
        self.sync = step.sync
        self.flat = step.flat
        self.params: Sequence[nn.Parameter] = step.flat.params
        self._held: dict[int, Tensor] = {}  # reduced gradients, while p.grad is this worker's own
        self._is_reduced = False  # whether p.grad is the gradient of the global batch
        self._is_local = False  # whether p.grad came from a backward that was not reduced
        self._has_begun = False

    @property
    def trains(self) -> bool:
        """Whether a backward can reach it: not where all of it is frozen at present."""
        return any(p.requires_grad for p in self.params)

    @property
    def sums_axes(self) -> bool:
        """Whether each backward is summed over workers of a replica with other tokens, at once."""
        return bool(self.step.shard.token_axes) and not self.flat.grads.buckets

    @property
    def whole_gradients(self) -> bool:
        """Whether this worker has the full gradient of every parameter after a backward."""
        scope = self.step.update.grad_norm
        return scope.over_shards is None and scope.over_replica is None

    # ------------------------------------------------------------------ forward and backward

    def begin_forward(self) -> None:
        """The weights may be used; called again before the next step it does nothing."""
        if not self._has_begun and not self.sync.collects:
            self.sync.begin()
            self._has_begun = True

    def begin_backward(self, loss: Tensor, fraction: float, reduces: bool) -> None:
        """`loss` has this `fraction`; with `reduces` the backward that follows is reduced."""
        self.step.parameters.check()
        self.begin_forward()
        self.sync.batch_fraction = fraction
        self._set_aside()
        if self.flat.grads.records_loss:
            self.flat.grads.record_loss(loss.detach() * fraction)
        if self.sync.collects and reduces:
            self._arm()

    def end_backward(self, reduces: bool) -> None:
        if self.sums_axes:  # what this backward has computed; then what was there before it
            self.step.shard.token_axes.sum_parameter_gradients(self.params)
            self._add_held()
        if not self.sync.collects:
            self.flat.reshard()
        elif reduces:
            self._collect()
        else:
            self._is_local = True
            self.flat.reshard()

    def forget(self, zeroed: set[int] | None = None) -> None:
        """The gradients were set to None or zero: all, or those of some parameters (ids)."""
        if not (self._held or self._is_reduced or self._is_local):
            return
        if zeroed is not None:
            self._held = {i: g for i, g in self._held.items() if id(self.params[i]) not in zeroed}
            others = (p for p in self.params if id(p) not in zeroed)
            if self._held or any(p.grad is not None for p in others):
                return
        self._held.clear()
        self._is_reduced = False
        self._is_local = False
        if all(p.grad is None for p in self.params):
            self.flat.grads.release()

    def _arm(self) -> None:
        self.sync.begin()
        self.flat.grads.arm(self.sync.reduce)

    def _collect(self) -> None:
        self.flat.grads.flush()
        self.flat.reshard()
        self.sync.collect()
        self._is_local = False
        self._add_held()

    def _add_held(self) -> None:
        for i, held in self._held.items():
            p = self.params[i]
            p.grad = held if p.grad is None else p.grad.add_(held)
        self._held.clear()
        self._is_reduced = True

    def _set_aside(self) -> None:
        if self._is_local and all(p.grad is None for p in self.params):
            self.forget()  # the script has zeroed the gradients by itself
        if not self._is_reduced:
            return
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self._held[i] = p.grad.detach().clone()  # it lies where the next ones will
                p.grad = None
        self._is_reduced = False

    # ------------------------------------------------------------------ update

    def before_update(self) -> None:
        """Reduce what is not yet."""
        if not self.sync.collects:
            return
        if self._is_local:
            self._arm()
            self._collect()
        elif not self._is_reduced and self.step.mesh.dp.size > 1:
            for name, p in self.flat.named:
                if p.grad is not None:
                    raise BadInput(
                        f"optimizer.step() found a gradient of {name} that job.backward has not "
                        "reduced over the workers: call job.backward(loss) instead of "
                        "loss.backward()"
                    )

    def after_update(self) -> None:
        """The optimizer has stepped."""
        self.sync.spread()
        self.step.update.steps += 1
        self._count()

    def update_on_servers(self) -> None:
        """Push this worker's gradients; servers update."""
        self.begin_forward()
        if self.sync.is_skipped:
            self.sync.skip()
            self.flat.zero_grad()
        else:
            self.flat.grads.arm(self.sync.reduce)
            self.flat.grads.flush()
            self.sync.finish()
        self._count()

    def _count(self) -> None:
        self.step.steps += 1
        self._has_begun = False

    # ------------------------------------------------------------------ the norm of gradients

    @torch.no_grad()
    def squared_norm(self, chosen: set[int]) -> Tensor:
        """Of the gradients of some parameters (by id) over all workers that have pieces of them."""
        update = self.step.update
        params = [p for p in update.params if id(p) in chosen]
        scope = update.grad_norm
        if scope.over_replica is not None:
            return scope.over_replica(params).double().square()
        grads = [p.grad for p in params if p.grad is not None]
        norm = nn.utils.get_total_norm(grads).double().to(self.flat.device)
        return norm.square() if scope.over_shards is None else scope.over_shards(norm.square())
