"""The optimizer of the user's own loop: a torch optimizer whose `step` synchronizes.

`job.setup` returns the script's own optimizer, so learning rate schedulers and GradScaler work on
it as ever. Where this worker updates a part of its parameters only (zero), or they belong to
several models, the parts have optimizers of their own, which take their settings from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.errors import BadInput
from shoal.replica.optimizers import PARAM_KEYS, LooksAt, like, looks_at, ratios
from shoal.sync.optimizer_step import OptimizerStep, common_lr, settings_of
from shoal.train.own_loop.part import LoopPart
from shoal.train.own_loop.torch_hooks import agree_on_overflow

Closure = Callable[[], Any]
Named = Iterable[tuple[str, nn.Parameter]]


class PartOptimizers:
    """A factory of optimizers of some parameters of `optimizer`, of its class and settings.

    While parts are built, it returns `optimizer` itself to one that asks for all parameters;
    afterwards, for checkpoints, always another one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.is_building = True

    def __call__(self, named: Named) -> torch.optim.Optimizer:
        wanted = {id(p) for _, p in named}
        if self.is_building and wanted == {id(p) for p in params_of(self.optimizer)}:
            return self.optimizer
        groups = [
            {"params": [p for p in group["params"] if id(p) in wanted], **settings}
            for group, settings in zip(
                self.optimizer.param_groups, settings_of(self.optimizer), strict=True
            )
        ]
        made: torch.optim.Optimizer = like(self.optimizer, [g for g in groups if g["params"]])
        for p in params_of(made):
            if p in self.optimizer.state:
                made.state[p] = self.optimizer.state[p]
        return made


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class LoopOptimizer:
    """Makes `optimizer.step` update all parts, and reduce before it what is not reduced yet.

    `global_loss` is that of the latest backward; `after` is called when the update is done.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[LoopPart],
        global_loss: Callable[[], Tensor | None],
        after: Callable[[LoopPart], None],
    ):
        self.optimizer = optimizer
        self.parts = parts
        self.of_parts = [part.step.update.optimizer for part in parts]
        # whether it updates all parameters itself
        self.is_alone = all(of_part is optimizer for of_part in self.of_parts)
        self._ids = {id(p) for p in params_of(optimizer)}
        self._global_loss = global_loss
        self._after = after
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._seen = settings_of(optimizer)
        self._is_stepping = False
        is_whole = self.is_alone and all(part.whole_gradients for part in parts)
        agrees = all(part.sync.collects or part.step.mesh.dp.size == 1 for part in parts)
        if isinstance(optimizer, torch.optim.LBFGS) and not (is_whole and agrees):
            raise BadInput(
                f"LBFGS needs the whole gradient on every worker, which {parts[0].step.term} does "
                "not give it: take ddp, or another optimizer"
            )
        self.is_scaled = False  # a GradScaler leaves out its steps of gradients that are too large
        agree_on_overflow(optimizer, parts[0].flat.device, self._agree_on_overflow)
        self._replace_methods()
        self._replace_own_methods()
        for part in parts:
            if not part.sync.updates_here:
                _follow_rate(part.step.update)

    def take_settings(self) -> None:
        """After a checkpoint was loaded: settings of the parts are those of the optimizer."""
        for group, of_part in self._pairs():
            group.update({k: v for k, v in of_part.items() if k not in PARAM_KEYS})
        self._seen = settings_of(self.optimizer)

    def give_settings(self) -> None:
        """Before an update or a checkpoint: a scheduler may have changed the optimizer's.

        What it has not changed stays as it is: some optimizers count steps in their groups.
        """
        present = settings_of(self.optimizer)
        changed = {
            id(group): {
                key: value  # tensors are shared with the parts
                for key, value in now.items()
                if key not in seen
                or (seen[key] is not value and (isinstance(value, Tensor) or seen[key] != value))
            }
            for group, now, seen in zip(
                self.optimizer.param_groups, present, self._seen, strict=True
            )
        }
        for group, of_part in self._pairs():
            of_part.update(changed[id(group)])
        self._seen = present

    def _skips(self) -> bool:
        """Whether this step is left out, on all workers: on_nan="skip", and a gradient is nan."""
        step = self.parts[0].step
        if step.options.on_nan != "skip":
            return False
        found = torch.zeros((), device=self.parts[0].flat.device)
        for p in params_of(self.optimizer):
            if p.grad is not None:
                found.logical_or_(~p.grad.isfinite().all())
        step.mesh.world.all_reduce(found, Op.MAX).wait()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        return bool(found)

    def _agree_on_overflow(self, found: Tensor) -> None:
        """Any worker's; for GradScaler."""
        self.is_scaled = True
        step = self.parts[0].step
        if step.mesh.world.size == 1:
            return
        if not self.parts[0].sync.synchronous:
            raise BadInput(
                f"under {step.term} workers do not wait for each other, so GradScaler cannot skip "
                "a step on all of them: take ddp, or bfloat16 without a scaler"
            )
        step.mesh.world.all_reduce(found, Op.MAX).wait()

    def step(self, closure: Closure | None = None) -> Any:
        closure = None if closure is None else self._with_global_loss(closure)
        if self.parts[0].sync.updates_here:
            with self._one_step():
                if self.is_alone and closure is not None:
                    return self._step(closure)
                result = None if closure is None else closure()
                for part in self.parts:
                    part.before_update()
                if not self._skips():
                    self._step_parts()
                return result
        self.give_settings()
        result = None if closure is None else closure()
        for part in self.parts:
            part.update_on_servers()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        self._after(self.parts[0])
        return result

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """The optimizer steps inside; optimizers inside of it do so as a part of that."""
        is_outer = not self._is_stepping
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = not is_outer
        if is_outer:
            for part in self.parts:
                part.after_update()
            self._after(self.parts[0])

    def _step_parts(self) -> None:
        if self.is_alone:
            self._step()
            return
        is_divided = sum(part.trains for part in self.parts) > 1
        if is_divided and looks_at(self.optimizer) is LooksAt.MODEL:
            raise BadInput(
                f"{type(self.optimizer).__name__} updates a parameter by looking at others, and "
                "job.setup updates each model, and what was frozen in it, apart: give it a model "
                "and an optimizer at a time"
            )
        self.give_settings()
        for of_part in self.of_parts:
            of_part.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers

    def _pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Groups of the optimizer, and those of the parts that belong to them."""
        if self.is_alone:
            return []
        group_of = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        groups = [g for of_part in self.of_parts for g in of_part.param_groups]
        return [(group_of[id(g["params"][0])], g) for g in groups if id(g["params"][0]) in group_of]

    def _with_global_loss(self, closure: Closure) -> Closure:
        """All workers have to see the same loss, since LBFGS decides by it."""

        def computed() -> Any:
            with torch.enable_grad():
                local = closure()
            for part in self.parts:
                part.before_update()
            total = self._global_loss()
            return local if total is None else total

        return computed

    def _replace_methods(self) -> None:
        """Attributes of the instance come before methods of its class."""

        def step(optimizer: torch.optim.Optimizer, closure: Closure | None = None) -> Any:
            return self.step(closure)

        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self._zero_grad(set_to_none)
            for part in self.parts:
                part.forget(self._ids)

        def add_param_group(optimizer: torch.optim.Optimizer, group: Any) -> None:
            raise BadInput(
                "job.setup has laid out the parameters of this optimizer: give it all of them "
                "before job.setup; those with requires_grad=False cost nothing"
            )

        if hasattr(self._step, "_wrapped_by_lr_sched"):  # a scheduler was made before
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        for method in (step, zero_grad, add_param_group):
            bound = MethodType(method, self.optimizer)  # schedulers wrap a bound method
            vars(self.optimizer)[method.__name__] = bound

    def _replace_own_methods(self) -> None:
        """Methods that torch's optimizers do not have act on the optimizers of the parts."""
        for inner in vars(self.optimizer).values():
            if isinstance(inner, torch.optim.Optimizer):
                vars(inner)["step"] = MethodType(self._inner_step(inner.step), inner)
        if self.is_alone:
            return
        for name in dir(type(self.optimizer)):
            is_own = not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
            if is_own and callable(getattr(type(self.optimizer), name)):
                vars(self.optimizer)[name] = self._on_parts(name)

    def _on_parts(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not all(part.whole_gradients for part in self.parts):
                raise BadInput(
                    f"{type(self.optimizer).__name__}.{name} acts on all parameters, and under "
                    f"{self.parts[0].step.term} a worker's optimizer has some of them: take ddp"
                )
            results = [getattr(o, name)(*args, **kwargs) for o in self.of_parts]
            return results[0]

        return call

    def _inner_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of an optimizer inside of it, such as that of SAM, which a script may call by itself."""

        def step(inner: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._is_stepping:
                for part in self.parts:
                    part.before_update()
            with self._one_step():
                return original(*args, **kwargs)

        return step


def _follow_rate(update: OptimizerStep) -> None:
    """Servers get the learning rate that the optimizer has in a step."""
    optimizer = update.optimizer
    initial = settings_of(optimizer)
    if any(float(settings["lr"]) == 0 for settings in initial):
        raise BadInput(
            "servers keep the ratios of learning rates, and one is 0 at job.setup: make the "
            "scheduler after job.setup"
        )
    of_groups = ratios(optimizer)
    update.lr = lambda step: common_lr(optimizer, initial, of_groups)
