"""One optimizer step on reduced gradients: unscale, clip, learning rate, update.

A scheduler of torch is a recursion, so the settings of a step are reached by as many calls of
`scheduler.step()`. After a checkpoint was loaded they are made again from the script's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.comm.group import Group, Op
from shoal.errors import BadInput
from shoal.replica.optimizers import PARAM_KEYS, fused_on_cpu, ratios
from shoal.runtime.trace import OFF, Tracer

if TYPE_CHECKING:
    from shoal.replica.split.shard import ReplicaGradNorm


SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
_TRIED_STEPS = 100


class Schedule:
    """The settings of an optimizer's parameter groups, step by step."""

    def __init__(
        self,
        factory: SchedulerFactory,
        optimizer: torch.optim.Optimizer,
        trial: torch.optim.Optimizer | None = None,
    ):
        """`trial` is an optimizer like it, to see whether the factory can be used."""
        self.optimizer = optimizer
        self._factory = factory
        self._initial = settings_of(optimizer)
        if trial is not None:
            check_scheduler(factory(trial) if callable(factory) else factory)
        self._scheduler: LRScheduler | None = None
        self._done = 0

    def advance(self, steps: int) -> None:
        """Give the optimizer the settings of the step that comes after so many."""
        if self._scheduler is None or self._done > steps:
            for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
                for key in [k for k in group if k not in initial and k not in PARAM_KEYS]:
                    del group[key]
                group.update(initial)
            self._done = 0
            self._scheduler = self._factory(self.optimizer)
        while self._done < steps:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self._scheduler.step()
            self._done += 1

    def restart(self) -> None:
        """The optimizer was loaded from a checkpoint."""
        self._scheduler = None

    def common_lr(self, ratios: Sequence[float]) -> float:
        return common_lr(self.optimizer, self._initial, ratios)

    def check_for_servers(self, trial: torch.optim.Optimizer, ratios: Sequence[float]) -> None:
        """See `common_lr`: of the first steps, on an optimizer that trains nothing."""
        schedule = Schedule(self._factory, trial)
        for step in range(_TRIED_STEPS):
            try:
                schedule.advance(step)
            except ValueError:  # a schedule of fewer steps is over
                return
            schedule.common_lr(ratios)


def check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise BadInput(
            "scheduler has to be a function from an optimizer to a scheduler, such as "
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100); "
            "ReduceLROnPlateau follows a metric: use it in a loop of your own (job.setup)"
        )


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of parameters."""
    return [{k: v for k, v in g.items() if k not in PARAM_KEYS} for g in optimizer.param_groups]


def common_lr(
    optimizer: torch.optim.Optimizer, initial: Sequence[dict[str, Any]], ratios: Sequence[float]
) -> float:
    """The one learning rate of all groups, but for their ratios: all that servers receive."""
    groups = optimizer.param_groups
    for group, before in zip(groups, initial, strict=True):
        changed = [k for k, v in before.items() if k != "lr" and group[k] != v]
        if changed:
            raise BadInput(
                f"the scheduler changes {changed[0]} of the optimizer, which servers do not "
                'receive in a step: use ps(update="worker"), or ddp'
            )
    rates = [float(g["lr"]) / r for g, r in zip(groups, ratios, strict=True) if r]
    if any(abs(rate - rates[0]) > 1e-6 * abs(rates[0]) for rate in rates):
        raise BadInput(
            "the scheduler gives parameter groups schedules of their own, and servers receive "
            'one learning rate a step: use ps(update="worker"), or ddp'
        )
    return rates[0] if rates else 0.0


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
        fuses: bool = False,  # whether an element's last bit may depend on where it lies
    ):
        self.named = named
        self.params = [p for _, p in named]
        self.factory = factory
        self.optimizer = make_optimizer(factory, named) if named else _idle()
        self.clip_norm = clip_norm
        self.grad_norm = grad_norm or GradNorm()
        self.lr = lr
        self.scaler = scaler
        self._fuses = fuses
        self.tracer: Tracer = OFF
        self.norms: list[Tensor] | None = None  # of gradients that are not at parameters
        self._total_norm: Tensor | None = None  # of these
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
        if self._fuses:
            with fused_on_cpu(self.optimizer):
                self._update()
        else:
            self._update()
        self.steps += 1

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def take_settings(self, step: int) -> None:
        """Give the optimizer the learning rate of a step, if that depends on the step."""
        if self.lr is not None:
            rate = float(self.lr(step))
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = rate * ratio
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
        grads = [p.grad for p in counted if p.grad is not None]
        norm = nn.utils.get_total_norm(grads if self.norms is None else self.norms)
        total = scope.over_shards(norm.double().square()).sqrt().to(norm.dtype)
        if self.norms is None:
            nn.utils.clip_grads_with_norm_(params, bound, total)
        else:
            self._total_norm = total

    def clip_by_norm(self, params: list[nn.Parameter]) -> None:
        """Clip gradients that have come to their parameters; `prepare` has had their `norms`."""
        if self.clip_norm is not None and self._total_norm is not None:
            nn.utils.clip_grads_with_norm_(params, self.clip_norm, self._total_norm)


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


class SharedGradScaler(torch.amp.GradScaler):
    """A GradScaler whose workers agree; `groups` are those whose gradients differ.

    An overflow that one worker finds skips the step on all of them, and all of them lower the
    scale: it costs one number per group and step. With `is_fixed` the scale is always 1.
    """

    def __init__(self, device: torch.device, groups: Sequence[Group], is_fixed: bool = False):
        super().__init__(device.type, init_scale=1.0 if is_fixed else 2.0**16)
        self._is_fixed = is_fixed
        self._workers_device = device
        self._groups = [group for group in groups if group.size > 1]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(1.0 if self._is_fixed else new_scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scale is None:  # a stage of a pipeline that has no loss
            self._lazy_init_scale_growth_tracker(self._workers_device)
        super().unscale_(optimizer)
        found = overflow_of(self, optimizer, self._workers_device)
        for group in self._groups:
            group.all_reduce(found, Op.MAX).wait()


def overflow_of(scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """What `unscale_` has found: above 0 to skip the step. What is written there counts."""
    state = scaler._per_optimizer_states[id(optimizer)]
    found = torch.zeros((), device=device)
    for value in state["found_inf_per_device"].values():
        found = found + value.to(device).view(())
    state["found_inf_per_device"] = {found.device: found}
    return found
