"""One optimizer step on reduced gradients: unscale, clip, learning rate, update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.observe.trace import OFF, Tracer
from shoal.replica.optimizers import ratios
from shoal.sync.lr_schedule import Schedule, SchedulerFactory

if TYPE_CHECKING:
    from shoal.replica.grad_norm import ReplicaGradNorm

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LearningRate = Callable[[int], float]
SumOfSquares = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GradNorm:
    """Whose gradients `clip_norm` looks at, where the optimizer of this rank owns a shard of them.

    `over_shards` makes the sum of squares of this rank's gradients that of all shards; or `params`
    names all parameters, where their gradients are here. `counted` are those of this rank, where
    it also has gradients of others. `over_replica` adds the shards of a replica that is split over
    workers.
    """

    over_shards: SumOfSquares | None = None
    params: list[nn.Parameter] | None = None
    over_replica: ReplicaGradNorm | None = None
    counted: list[nn.Parameter] | None = None


class OptimizerStep:
    """Owns the optimizer. `lr(step)` is absolute; parameter groups keep their ratios to it.

    `named` may be a shard of the model, or nothing.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        factory: OptimizerFactory,
        *,
        clip_norm: float | None = None,
        grad_norm: GradNorm | None = None,
        lr: LearningRate | None = None,
        scheduler: SchedulerFactory | None = None,
        scaler: torch.amp.GradScaler | None = None,
        tracer: Tracer = OFF,
    ):
        self.named = named
        self.params = [p for _, p in named]
        self.factory = factory
        self.optimizer = make_optimizer(factory, named) if named else _idle()
        self.clip_norm = clip_norm
        self.grad_norm = grad_norm or GradNorm()
        self.lr = lr
        self.scaler = scaler
        self.tracer = tracer
        self.steps = 0
        self._ratios = ratios(self.optimizer)
        self._scheduler = scheduler
        self.schedule = self._make_schedule(scheduler)

    def take_shard(
        self,
        named: list[tuple[str, nn.Parameter]],
        counted: list[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Update other parameters from now on, by an optimizer that `factory` made for them."""
        self.named = named
        self.params = [p for _, p in named]
        self.optimizer = _idle() if optimizer is None else optimizer
        self._ratios = ratios(self.optimizer)
        self.schedule = self._make_schedule(self._scheduler)
        if self.grad_norm.counted is not None:
            self.grad_norm = replace(self.grad_norm, counted=counted)

    def apply(self) -> None:
        with self.tracer.span("update"):
            self.prepare()
            self.commit()

    def prepare(self) -> None:
        """Unscale and clip the gradients, which may communicate."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self._clip(self.clip_norm)

    def commit(self) -> None:
        """Update by gradients that are prepared."""
        self.take_settings(self.steps)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.steps += 1

    def take_settings(self, step: int) -> None:
        """Give the optimizer the learning rate of a step, if that depends on the step."""
        if self.lr is not None:
            self.set_lr(float(self.lr(step)))
        elif self.schedule is not None:
            self.schedule.advance(step)

    def learning_rate(self, step: int) -> float | None:
        """The learning rate of a step, for what others update; None: always the same."""
        self.take_settings(step)
        if self.lr is not None:
            return float(self.lr(step))
        return None if self.schedule is None else self.schedule.common_lr(self._ratios)

    def check_for_servers(self) -> None:
        """Refuse a schedule that servers could not follow."""
        if self.schedule is not None:
            trial = make_optimizer(self.factory, self.named)
            self.schedule.check_for_servers(trial, self._ratios)

    def _make_schedule(self, scheduler: SchedulerFactory | None) -> Schedule | None:
        if scheduler is None:
            return None
        if self.lr is not None:
            raise BadInput("job.step takes lr or scheduler, not both")
        return (
            Schedule(scheduler, self.optimizer, make_optimizer(self.factory, self.named))
            if self.named
            else None
        )

    def scale(self, weight: Tensor) -> Tensor:
        """The factor to start backward with, so that fp16 gradients do not vanish."""
        if self.scaler is None:
            return weight
        # the scale stays float32: an fp16 loss could not hold it
        scaled: Tensor = self.scaler.scale(weight.float())
        return scaled

    def _clip(self, bound: float) -> None:
        scope = self.grad_norm
        params = self.params if scope.params is None else scope.params
        if scope.over_replica is not None:
            nn.utils.clip_grads_with_norm_(params, bound, scope.over_replica(params))
            return
        if scope.over_shards is None:
            nn.utils.clip_grad_norm_(params, bound)
            return
        counted = params if scope.counted is None else scope.counted
        norm = nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None])
        total = scope.over_shards(norm.double().square()).sqrt().to(norm.dtype)
        nn.utils.clip_grads_with_norm_(params, bound, total)

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
    return optimizer


def _idle() -> torch.optim.Optimizer:
    """For a rank that owns no parameter: torch's optimizers refuse to have none."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)
