"""The optimizer of the user's own loop: a torch optimizer whose `step` synchronizes.

`job.setup` returns the script's own optimizer, so learning rate schedulers and GradScaler work on
it as ever. Where this worker updates a part of its parameters only (zero), or they belong to
several models, the parts have optimizers of their own, which take their settings from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.train.loop_part import LoopPart
from shoal.train.served_settings import ServedSettings

_PARAMS = ("params", "param_names")
Closure = Callable[[], Any]
Named = Iterable[tuple[str, nn.Parameter]]


class PartOptimizers:
    """A factory of optimizers of some parameters of `optimizer`.

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
        return optimizer_of_some(self.optimizer, wanted)


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_of_some(optimizer: torch.optim.Optimizer, wanted: set[int]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings, of some of its parameters (by id)."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    groups = []
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if id(p) in wanted]
        if params:
            settings = {k: v for k, v in group.items() if k not in _PARAMS}
            groups.append({"params": params, **settings})
    try:
        made = kind(groups, **defaults)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{kind.__name__} cannot be made for a part of its parameters, which this strategy "
            f"needs ({error}): take ddp"
        ) from error
    for p in params_of(made):
        if p in optimizer.state:
            made.state[p] = optimizer.state[p]
    return made


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
        self._global_loss = global_loss
        self._after = after
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._check_lbfgs()
        self._check_scaling()
        self._replace_methods()
        for part in parts:
            if not part.sync.updates_here:
                update = part.step.update
                update.lr = ServedSettings(update.optimizer).learning_rate

    @property
    def is_alone(self) -> bool:
        """Whether it updates all parameters itself."""
        return all(part.step.update.optimizer is self.optimizer for part in self.parts)

    def step(self, closure: Closure | None = None) -> Any:
        return self._update(None if closure is None else self._with_global_loss(closure))

    def take_settings(self) -> None:
        """After a checkpoint was loaded: settings of the parts are those of the optimizer."""
        for group, of_part in self._pairs():
            group.update(_settings(of_part))

    def give_settings(self) -> None:
        """Before an update or a checkpoint: a scheduler may have changed the optimizer's."""
        for group, of_part in self._pairs():
            of_part.update(_settings(group))

    def _check_scaling(self) -> None:
        """Have GradScaler call `step` in any case, so that its use is seen where it goes wrong."""
        self._refuses_scaler = any(
            part.step.mesh.world.size > 1 and not (part.sync.collects and part.whole_gradients)
            for part in self.parts
        )
        if self._refuses_scaler:
            vars(self.optimizer)["_step_supports_amp_scaling"] = True

    def _update(self, closure: Closure | None) -> Any:
        if self._refuses_scaler and hasattr(self.optimizer, "found_inf"):
            raise BadInput(
                f"under {self.parts[0].step.term} each worker has other gradients, so GradScaler "
                "would skip a step on some of them only: take ddp, or bfloat16 without a scaler"
            )
        if not self.parts[0].sync.updates_here:
            self.give_settings()
            result = _call(closure)
            for part in self.parts:
                part.update_on_servers()
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
            self._after(self.parts[0])
            return result
        if self.is_alone and closure is not None:
            result = self._step(closure)
        else:
            result = _call(closure)
            for part in self.parts:
                part.before_update()
            self._step_parts()
        for part in self.parts:
            part.after_update()
        self._after(self.parts[0])
        return result

    def _step_parts(self) -> None:
        if self.is_alone:
            self._step()
            return
        self.give_settings()
        for part in self.parts:
            part.step.update.optimizer.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers

    def _pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Groups of the optimizer, and those of the parts that belong to them."""
        if self.is_alone:
            return []
        group_of = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        of_parts = [g for part in self.parts for g in part.step.update.optimizer.param_groups]
        return [
            (group_of[id(g["params"][0])], g) for g in of_parts if id(g["params"][0]) in group_of
        ]

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)
        for part in self.parts:
            for p in part.params:  # under zero, those of other workers
                if set_to_none:
                    p.grad = None
            part.forget()

    def _replace_methods(self) -> None:
        """Attributes of the instance come before methods of its class."""

        def step(optimizer: torch.optim.Optimizer, closure: Closure | None = None) -> Any:
            return self.step(closure)

        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad(set_to_none)

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

    def _check_lbfgs(self) -> None:
        if not isinstance(self.optimizer, torch.optim.LBFGS):
            return
        is_whole = self.is_alone and all(part.whole_gradients for part in self.parts)
        agrees = all(p.sync.collects or p.step.mesh.dp.size == 1 for p in self.parts)
        if not is_whole or not agrees:
            raise BadInput(
                f"LBFGS needs the whole gradient on every worker, which {self.parts[0].step.term} "
                "does not give it: take ddp, or another optimizer"
            )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _PARAMS}


def _call(closure: Closure | None) -> Any:
    return None if closure is None else closure()
