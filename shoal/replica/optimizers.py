"""What is known of optimizers: their learning rates, and what an update looks at.

Workers that own some parameters (zero, pp) or slices of them (tp, ep) have an optimizer each. That
is right where an update depends on nothing that other workers have. A class says what it looks at
with an attribute, `looks_at = "element"`, "parameter" or "model"; else its name decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from shoal.errors import BadInput

PARAM_KEYS = ("params", "param_names")
# what these do to one element depends on no other, so a worker or server may hold a slice
ELEMENTWISE = (
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop"),
)
_ELSEWHERE_ELEMENTWISE = (
    *("SparseAdam", "Lion", "AdaBelief", "Adan"),
    *("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"),
)
_OF_A_PARAMETER = ("Adafactor", "LAMB", "Lamb", "LARS", "Muon", "Shampoo", "SOAP")
# one step size, or one norm, of all parameters
_OF_THE_MODEL = (
    *("Prodigy", "DAdaptSGD", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptAdaGrad"),
    *("SAM", "FusedLAMB", "LBFGS"),
)


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
IMPLEMENTATIONS = ("fused", "foreach", "differentiable", "capturable")


class LooksAt(IntEnum):
    """What an update of one element depends on."""

    ELEMENT = 0
    PARAMETER = 1
    MODEL = 2


def looks_at(optimizer: torch.optim.Optimizer) -> LooksAt | None:
    """None for an optimizer that is not known."""
    said = getattr(optimizer, "looks_at", None)
    if said is not None:
        return LooksAt[said.upper()]
    kind = type(optimizer)
    names = {base.__name__ for base in kind.__mro__ if _step(base) is _step(kind)}
    known = {
        LooksAt.ELEMENT: {*ELEMENTWISE, *_ELSEWHERE_ELEMENTWISE},
        LooksAt.PARAMETER: {*_OF_A_PARAMETER},
        LooksAt.MODEL: {*_OF_THE_MODEL},
    }
    return next((what for what, kinds in known.items() if names & kinds), None)


def _step(kind: type) -> Any:
    """The function that a class updates with; torch wraps it for profilers."""
    return inspect.unwrap(getattr(kind, "step", kind))


def refuse(found: LooksAt, name: str, strategy: str) -> None:
    """Raise `BadInput` for an optimizer that looks at more than a worker has."""
    if found is LooksAt.PARAMETER:
        raise BadInput(
            f"{name} updates an element by looking at the whole parameter, as far as known, and "
            f"under {strategy} a worker has a slice of it: take ddp, zero or ps, or an elementwise "
            f'optimizer such as AdamW; if it is elementwise, set {name}.looks_at = "element"'
        )
    if found is LooksAt.MODEL:
        raise BadInput(
            f"{name} updates a parameter by looking at others, and under {strategy} a worker has "
            "some of them: take ddp, or an optimizer that looks at each parameter alone, such as "
            "AdamW"
        )


def ratios(optimizer: torch.optim.Optimizer) -> list[float]:
    """Each group's learning rate divided by the optimizer's; a schedule keeps these ratios."""
    base = optimizer.defaults.get("lr")
    if not base:
        return [1.0] * len(optimizer.param_groups)
    return [float(group["lr"]) / float(base) for group in optimizer.param_groups]


def like(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """An optimizer of the same class and settings, with other groups."""
    kind: Callable[..., Any] = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    return kind(groups, **defaults)


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a script has registered functions that its step calls."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


@contextmanager
def fused_on_cpu(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block its step is one kernel for all parameters on a CPU, where torch has one.

    The settings of the script and those in checkpoints stay as they are. Adam takes a fifth of the
    time that it takes tensor by tensor.
    """
    groups = optimizer.param_groups if _can_fuse(optimizer) else []
    before = [group["fused"] for group in groups]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["fused"] = value


def _can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """A script's own choice stands; sparse gradients have no such kernel."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    first = next((p for group in groups for p in group["params"]), None)
    return (
        first is not None
        and first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.float64)
        and kind in _FUSED
        and not any(group.get(name) for group in groups for name in IMPLEMENTATIONS)
        and (not isinstance(optimizer, torch.optim.SGD) or _sgd_can_fuse(optimizer))
    )


def _sgd_can_fuse(optimizer: torch.optim.SGD) -> bool:
    """Its kernel takes no sparse gradients, and momentum of all parameters or of none.

    A parameter that had no gradient until now, such as an expert that got no token, has none yet.
    """
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    have_momentum = {bool(optimizer.state.get(p)) for p in trained}
    return len(have_momentum) < 2 and not any(p.grad.is_sparse for p in trained)
