"""The loss that a script gives: which arguments it takes, and the numbers that it returns.

    batch                 loss is called with
    (x, y)                (outputs, y)
    (x, y, w)             (outputs, y, w)
    (x,), a dict, …       (outputs) or (outputs, batch), whichever it takes
    no loss               the model returns its own: a number, `outputs.loss`, `outputs["loss"]`

It returns one number, or a tuple or dict of numbers. The first one, or "loss", is trained; the
others are averaged like the loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput

LossFunction = Callable[..., Any]
NamedNumbers = dict[str, Tensor]


class LossArguments(tuple[Any, ...]):
    """What a loss gets behind the outputs, where that is not one argument called targets."""

    is_optional: bool = False  # a loss that takes the outputs alone does not get it

    @classmethod
    def optional(cls, value: Any) -> LossArguments:
        arguments = cls((value,))
        arguments.is_optional = True
        return arguments


class BoundLoss:
    """A script's loss, called as `loss(outputs, targets)` by the engine."""

    def __init__(self, function: LossFunction | None):
        self.function = function
        self._takes_one = function is not None and _takes_one(function)
        self._is_checked = False
        self.hooked: str | None = None  # a module with a forward hook, which may run elsewhere

    def __call__(self, outputs: Any, targets: Any) -> Any:
        if self.function is None:
            return own_loss(outputs)
        arguments: tuple[Any, ...] = (targets,)
        if isinstance(targets, LossArguments):
            arguments = () if targets.is_optional and self._takes_one else tuple(targets)
        if not self._is_checked:
            _check_arguments(self.function, 1 + len(arguments))
            self._is_checked = True
        try:
            return self.function(outputs, *arguments)
        except (LookupError, AttributeError, TypeError) as error:
            if self.hooked is None:
                raise
            raise BadInput(
                f"the loss function failed ({type(error).__name__}: {error}); the last stage of "
                f"the pipeline calls it, and forward hooks, such as that of {self.hooked}, run "
                "where their module is: return what the loss needs from the model, or leave pp out"
            ) from error


def sum_of_samples(function: LossFunction | None) -> str | None:
    """The name of a loss of torch with reduction="sum"; None for any other."""
    if isinstance(function, functools.partial):
        is_sum = function.keywords.get("reduction") == "sum"
        called = function.func
    else:
        is_sum = getattr(function, "reduction", None) == "sum"
        called = type(function)
    if not is_sum or not getattr(called, "__module__", "").startswith("torch.nn."):
        return None
    return called.__name__


def own_loss(outputs: Any) -> Tensor:
    """The loss that a model returns with its outputs, as Hugging Face models do."""
    loss = outputs
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    elif not isinstance(outputs, Tensor):
        loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    raise BadInput(
        "job.step has no loss, and the model returns none: it has to return one number, or its "
        'outputs with a number called loss, as Hugging Face models do if "labels" are in the '
        "batch; or give job.step(model, loss, …)"
    )


def split_numbers(returned: Any) -> tuple[Any, NamedNumbers]:
    """What is trained, and the other numbers by name; those of a tuple are called 1, 2, …"""
    if isinstance(returned, Tensor):
        return returned, {}
    if isinstance(returned, Mapping):
        if "loss" not in returned:
            raise BadInput(
                'a loss function that returns a dict trains its entry "loss", and it returned '
                f"{', '.join(map(repr, returned)) or 'an empty one'}"
            )
        others = {str(k): _number(v, k) for k, v in returned.items() if k != "loss"}
        return returned["loss"], others
    if isinstance(returned, tuple) and returned:
        return returned[0], {str(i): _number(v, i) for i, v in enumerate(returned) if i}
    return returned, {}


def in_form_of(names: Sequence[str] | None, loss: Tensor, numbers: Sequence[Tensor]) -> Any:
    """The loss and the other numbers of a step, in the form in which the loss returned them."""
    if not names:
        return loss
    if all(name.isdecimal() for name in names):
        return (loss, *numbers)
    return {"loss": loss, **dict(zip(names, numbers, strict=True))}


class StepNumbers:
    """The other numbers of the micro-batches of a step, weighted like their losses."""

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.begin()

    def begin(self) -> None:
        self._of: dict[int, NamedNumbers] = {}
        self._sum: Tensor | None = None

    def note(self, microbatch: int, numbers: NamedNumbers) -> None:
        names = list(numbers)
        if self.names is None:
            self.names = names
        if names != self.names:
            raise BadInput(
                "the loss function has to return the same numbers in every step: it returned "
                f"{', '.join(self.names) or 'none'} besides the loss, and then "
                f"{', '.join(names) or 'none'}"
            )
        self._of[microbatch] = numbers

    def weigh(self, microbatch: int, weight: float | Tensor) -> None:
        """Add those of a micro-batch; without weight they may be no numbers at all."""
        numbers = self._of.pop(microbatch, {})
        if numbers and float(weight):
            weighted = torch.stack([value.double() for value in numbers.values()]) * weight
            self._sum = weighted if self._sum is None else self._sum + weighted

    def total(self, device: torch.device) -> Tensor:
        """The weighted sums, in the order of the names."""
        zeros = torch.zeros(len(self.names or ()), dtype=torch.float64, device=device)
        return zeros if self._sum is None else self._sum


def _number(value: Any, name: Any) -> Tensor:
    number = value.detach() if isinstance(value, Tensor) else value
    if isinstance(number, (Tensor, int, float)) and torch.as_tensor(number).dim() == 0:
        return torch.as_tensor(number)
    raise BadInput(
        f"the loss function returned {type(value).__name__} for {name!r}: what it returns besides "
        "the loss are numbers, means over the samples"
    )


def _signature_of(function: LossFunction) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def _check_arguments(function: LossFunction, count: int) -> None:
    """Raise `BadInput` if it cannot be called with so many arguments."""
    if count > 2 and function in (nn.functional.cross_entropy, nn.functional.nll_loss):
        raise BadInput(
            f"what follows the targets in a batch goes to the loss, and {function.__name__} takes "
            "weights of classes there; for weights of samples give a loss of your own: "
            "lambda outputs, targets, weights: "
            f"({function.__name__}(outputs, targets, reduction='none') * weights).mean()"
        )
    signature = _signature_of(function)
    try:
        if signature is not None:
            signature.bind(*[None] * count)
    except TypeError as error:
        given = ["outputs", "targets"] if count == 2 else ["outputs", *"abcdefgh"[: count - 1]]
        raise BadInput(
            f"the loss function takes {signature}, and with these batches it is called as "
            f"loss({', '.join(given)}): {error}"
        ) from error


def _takes_one(function: LossFunction) -> bool:
    """Whether the outputs are all that it takes."""
    signature = _signature_of(function)
    if signature is None:
        return False
    kinds = [p.kind for p in signature.parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    return not takes_any and sum(kind in positional for kind in kinds) < 2
