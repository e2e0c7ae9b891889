"""One optimizer step on gradients that are agreed: unscale, clip, learning rate, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.observe.trace import OFF, Tracer
from shoal.replica.grad_norm import ReplicaGradNorm
from shoal.server.model.named_optimizer import ratios

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LearningRate = Callable[[int], float]
NormOver = Callable[[Tensor], Tensor]


class OptimizerStep:
    """Owns the optimizer. `lr(step)` is absolute; parameter groups keep their ratios to it.

    `named` may be a part of the model, or nothing. `norm_over` then makes the sum of squares of
    these gradients that of all of them, for clipping; or `clipped` names them all, where they are
    at hand. `total_norm` knows the norm of a gradient that is spread over stages.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        factory: OptimizerFactory,
        *,
        clip_norm: float | None = None,
        lr: LearningRate | None = None,
        scaler: torch.amp.GradScaler | None = None,
        norm_over: NormOver | None = None,
        clipped: list[nn.Parameter] | None = None,
        total_norm: ReplicaGradNorm | None = None,
        tracer: Tracer = OFF,
    ):
        self.named = named
        self.params = [p for _, p in named]
        self.factory = factory
        self.optimizer = make_optimizer(factory, named) if named else _idle()
        self.clip_norm = clip_norm
        self.lr = lr
        self.scaler = scaler
        self.tracer = tracer
        self.norm_over = norm_over
        self.clipped = self.params if clipped is None else clipped
        self.total_norm = total_norm
        self.steps = 0
        self._ratios = ratios(self.optimizer)

    def apply(self) -> None:
        with self.tracer.span("update"):
            if self.lr is not None:
                self.set_lr(self.lr(self.steps))
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip_norm is not None:
                self._clip(self.clip_norm)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.steps += 1

    def scale(self, weight: Tensor) -> Tensor:
        """The factor to start backward with, so that fp16 gradients do not vanish."""
        if self.scaler is None:
            return weight
        # the scale stays float32: an fp16 loss could not hold it
        scaled: Tensor = self.scaler.scale(weight.float())
        return scaled

    def _clip(self, bound: float) -> None:
        if self.total_norm is not None:
            nn.utils.clip_grads_with_norm_(self.clipped, bound, self.total_norm(self.clipped))
            return
        if self.norm_over is None:
            nn.utils.clip_grad_norm_(self.clipped, bound)
            return
        norm = nn.utils.get_total_norm([p.grad for p in self.clipped if p.grad is not None])
        total = self.norm_over(norm.double().square()).sqrt().to(norm.dtype)
        nn.utils.clip_grads_with_norm_(self.clipped, bound, total)

    def set_lr(self, value: float) -> None:
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = value * ratio


def make_optimizer(
    factory: OptimizerFactory, named: list[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    optimizer: Any = factory(iter(named)) if callable(factory) else None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(
            "optimizer has to be a function from (name, parameter) pairs to a torch optimizer, "
            "such as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput("LBFGS computes the loss several times a step, which job.step cannot do")
    return optimizer


def _idle() -> torch.optim.Optimizer:
    """For a rank that owns no parameter: torch's optimizers refuse to have none."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
